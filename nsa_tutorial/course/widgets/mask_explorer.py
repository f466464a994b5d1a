"""The mask explorer: what each branch of native sparse attention lets a query see, as tokens, as
blocks, and as a list with prices.

    from nsa_tutorial.course.widgets import mask_explorer
    mask_explorer.mask_explorer()

`Settings` are the controls, brought into range. `source` gives the scores of a group of heads, made
up or of the trained heads; `importance` and `choose_blocks` turn them into block lists,
`branch_masks` into what is seen, `report` into numbers, `draw` into a picture. It is computed here
by means of its own, from the definitions, and the tests hold it against the chapters' modules.

It prices three branches, each computed by one program per query and KV head (`costs.py`), and apart
from them the choice of the blocks: not the making of the summaries, not the gated sum.

Symbols: `N` positions, `G` query heads of the group, `BS` block size, `NB` blocks, `M_c` summaries.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import ipywidgets
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.font_manager import findfont
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from PIL import Image, ImageDraw, ImageFont

from nsa_tutorial.course.figures import PALETTE, SURFACE, Picture, new_figure
from nsa_tutorial.course.widgets import Panel, panel
from nsa_tutorial.runtime import costs
from nsa_tutorial.runtime.costs import Cost

MAX_N = 512
SYNTHETIC, REAL = "sink + diagonal + random copies", "trained heads"
POWERS = (4, 8, 16, 32, 64, 128)
# in the order of drawing: later ones cover earlier ones
BRANCHES = "compressed", "window", "selected", "own block"
SHOWN = {
    "all branches": BRANCHES,
    "compressed": ("compressed",),
    "selected": ("selected", "own block"),
    "sliding window": ("window",),
}
ITEMSIZE = 2  # bytes: fp16 or bf16
TILE = 64  # queries that share their loads in the dense kernel compared with
ROOM = 17  # lines of the list
LIST_WIDTH, LIST_HEIGHT = 312, 390  # pixels

Masks = Mapping[str, np.ndarray]

# -- where the scores come from --


@dataclass(frozen=True)
class Source:
    """The scores of one group of query heads, and the shapes that its costs are counted for.

    Attributes:
        logits: scaled scores `[G, N, N]` before the causal mask and the softmax, read-only.
        D, DV: widths of a key and of a value.
        text: the bytes that the positions stand for, or None.
    """

    logits: np.ndarray
    D: int
    DV: int
    text: bytes | None = None


@functools.cache
def _heads() -> object | None:
    """The stored heads, or None where there are none."""
    try:
        from nsa_tutorial.course import heads

        return heads.load()
    except (ImportError, FileNotFoundError):
        return None


def sources() -> dict[str, tuple[int, int]]:
    """The data that can be explored: by name, the number of head groups and the number of
    positions."""
    heads, found = _heads(), {SYNTHETIC: (2, MAX_N)}
    return (
        found
        if heads is None
        else {**found, REAL: (heads.k.shape[2], min(heads.k.shape[1], MAX_N))}
    )


@functools.lru_cache(maxsize=2)
def synthetic_logits(group: int, G: int = 4) -> np.ndarray:
    """Made-up scores `[G, 512, 512]` of `G` heads: a sink at the start, a diagonal, and a few
    passages that copy an earlier one.

    The copies belong to the group, their strength to the head. The same group always gives the same
    numbers, read-only.
    """
    random = np.random.default_rng(group)
    t, key = np.arange(MAX_N)[:, None], np.arange(MAX_N)[None, :]
    # some keys please every query
    logits = 0.5 * random.normal(size=(G, MAX_N, MAX_N)) + random.normal(size=(1, 1, MAX_N))
    logits += 6.0 * (key < 4) + 5.0 * np.exp(-np.abs(t - key) / 8)
    starts = np.sort(random.integers(MAX_N // 10, MAX_N - 48, size=7))
    for start in starts:
        length, distance = random.integers(32, 80), random.integers(40, 350)
        copied = (t >= start) & (t < start + length) & (start >= distance)
        # a little to each side, as trained heads look
        near = np.exp(-np.abs(t - distance - key) / 6)
        logits += random.uniform(6, 10, size=(G, 1, 1)) * copied * near
    logits.setflags(write=False)
    return logits


@functools.lru_cache(maxsize=8)
def source(data: str, N: int, group: int) -> Source:
    """The scores of head group `group` of one of `sources()`, for the first `N` positions."""
    if data == SYNTHETIC:
        found = Source(synthetic_logits(group)[:, :N, :N], D=128, DV=128)
    else:
        heads = _heads()
        mine = slice(group * heads.G, (group + 1) * heads.G)
        # [N, G, D], [N, D]
        q, k = heads.q[0, :N, mine].double().numpy(), heads.k[0, :N, group].double().numpy()
        found = Source(
            np.einsum("igd,jd->gij", q, k) * k.shape[1] ** -0.5,
            k.shape[1],
            heads.v.shape[3],
            heads.text[:N],
        )
    found.logits.setflags(write=False)
    return found


# -- settings --


@dataclass(frozen=True)
class Settings:
    """What is explored. A value out of range is moved to the nearest one allowed, and `adjusted`
    says so.

    Attributes:
        N: sequence length, 16 to 512.
        block_size: keys per block, a power of two from 4 to 128.
        top_n: blocks listed per query, the forced ones among them.
        num_initial, num_local: first and last blocks of a query's past that are always listed; the
            last one is its own. Together at most `top_n`; local ones go first.
        window: keys of the sliding window, the query's own included.
        length, stride: tokens of a summary and from one summary to the next: powers of two, a
            summary no longer than the text, the stride no longer than the summary or a block.
        query: position of the query that is looked at.
        group: which group of heads of `data`.
        data: one of `sources()`.
        adjusted: what was moved, in words.
    """

    N: int = 512
    block_size: int = 16
    top_n: int = 7
    num_initial: int = 1
    num_local: int = 2
    window: int = 32
    length: int = 16
    stride: int = 8
    query: int = 410
    group: int = 0
    data: str = SYNTHETIC
    adjusted: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self) if f.type == "int"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
        if self.data not in sources():
            raise ValueError(f"data: expected one of {list(sources())}, got {self.data!r}")
        groups, positions = sources()[self.data]
        self._clamp("N", 16, positions)
        self._clamp("block_size", 4, POWERS[-1], power=True)
        self._clamp("top_n", 1, MAX_N)
        self._clamp("num_local", 0, self.top_n)
        self._clamp("num_initial", 0, self.top_n - self.num_local)
        self._clamp("window", 1, self.N)
        self._clamp("length", 4, min(self.N, POWERS[-1]), power=True)
        self._clamp("stride", 4, min(self.length, self.block_size), power=True)
        self._clamp("query", 0, self.N - 1)
        self._clamp("group", 0, groups - 1)

    def _clamp(self, name: str, low: int, high: int, power: bool = False) -> None:
        given = getattr(self, name)
        value = min(max(given, low), high)
        if power:
            value = 2 ** (value.bit_length() - 1)
        if value != given:
            object.__setattr__(self, name, value)
            object.__setattr__(
                self, "adjusted", (*self.adjusted, f"{name} {given} becomes {value}")
            )

    @property
    def NB(self) -> int:
        """Blocks of the text; the last one may be short."""
        return -(-self.N // self.block_size)


# -- which blocks are listed --


def summary_visible(settings: Settings) -> np.ndarray:
    """Bool `[N, M_c]`: summary `j` is visible to query `t` once its last token,
    `j · stride + length - 1`, is at `t` or before."""
    last = np.arange(0, settings.N - settings.length + 1, settings.stride) + settings.length - 1
    return last[None, :] <= np.arange(settings.N)[:, None]


def importance(settings: Settings, logits: np.ndarray) -> np.ndarray:
    """How much the compressed branch cares for each block, `[N, NB]`, summed over the heads of
    `logits` `[G, N, N]`.

    A summary is a mean of keys, so its score is the mean of its tokens' scores. Then a softmax over
    the visible summaries; and every `stride` tokens of a summary give its whole weight to the block
    they lie in (arXiv 2502.11089, Eq. 9 and 10).
    """
    N, length, stride = settings.N, settings.length, settings.stride
    visible = summary_visible(settings)
    M_c, per_summary = visible.shape[1], length // stride

    # Sums run in the same order for every summary and every block, so that equal ones stay equal to
    # the last bit.
    pieces = logits[..., : N // stride * stride].reshape(*logits.shape[:2], -1, stride).sum(-1)
    scores = sum(pieces[..., offset : offset + M_c] for offset in range(per_summary)) / length
    scores = np.where(visible, scores, -np.inf)  # [G, N, M_c]
    largest = scores.max(-1, keepdims=True)
    # all 0 where no summary is visible
    weights = np.exp(scores - np.where(np.isfinite(largest), largest, 0))
    weights = (weights / np.maximum(weights.sum(-1, keepdims=True), 1e-30)).sum(0)  # [N, M_c]

    total = np.zeros((settings.NB, N))
    for summary in range(M_c):
        for offset in range(per_summary):
            total[(summary + offset) * stride // settings.block_size] += weights[:, summary]
    return total.T


def forced_blocks(settings: Settings) -> np.ndarray:
    """Bool `[N, NB]`: the blocks listed whatever their importance."""
    block, own = (
        np.arange(settings.NB)[None, :],
        np.arange(settings.N)[:, None] // settings.block_size,
    )
    return (block <= own) & ((block < settings.num_initial) | (block > own - settings.num_local))


def choose_blocks(settings: Settings, scores: np.ndarray) -> np.ndarray:
    """Bool `[N, NB]`: the `top_n` blocks of every query by `scores` `[N, NB]`, forced ones first,
    ties to the lower id.

    A query with fewer blocks behind it lists all of them; a block that begins after the query is
    never listed.
    """
    causal = (
        np.arange(settings.NB)[None, :] <= np.arange(settings.N)[:, None] // settings.block_size
    )
    rank = np.where(forced_blocks(settings), np.inf, scores)
    rank = np.where(causal, rank, -np.inf)
    best = np.argsort(-rank, axis=-1, kind="stable")[:, : settings.top_n]
    listed = np.zeros_like(causal)
    np.put_along_axis(listed, best, True, axis=-1)
    return listed & causal


# -- what is seen --


def branch_masks(settings: Settings, scores: np.ndarray) -> dict[str, np.ndarray]:
    """What every query sees through each branch: a bool `[N, N]`, query by key, for each of
    `BRANCHES`.

    Args:
        settings: all but `query` matters.
        scores: importance of the blocks, `[N, NB]`.

    Returns:
        `"selected"`, the keys of listed blocks but the query's own, and `"own block"`, those of its
        own if that is listed; together the selected branch. `"window"`, the last keys.
        `"compressed"`, the keys that some visible summary covers: seen through the summary, not one
        by one.
    """
    t, key = np.arange(settings.N)[:, None], np.arange(settings.N)[None, :]
    # [N, N]
    listed = choose_blocks(settings, scores)[:, np.arange(settings.N) // settings.block_size] & (
        key <= t
    )
    own = key // settings.block_size == t // settings.block_size
    ended = summary_visible(settings).sum(-1, keepdims=True)  # [N, 1]
    # the visible summaries are the first ones, and they leave no gap: stride <= length
    covered = np.where(ended > 0, (ended - 1) * settings.stride + settings.length, 0)
    return {
        "compressed": key < covered,
        "window": (key <= t) & (key > t - settings.window),
        "selected": listed & ~own,
        "own block": listed & own,
    }


def block_masks(settings: Settings, masks: Masks) -> dict[str, np.ndarray]:
    """The same by blocks: bool `[N, NB]`, True where a branch shows the query some key of the
    block."""
    starts = np.arange(0, settings.N, settings.block_size)
    return {name: np.logical_or.reduceat(mask, starts, axis=1) for name, mask in masks.items()}


def picture_colours() -> dict[str, tuple[float, float, float]]:
    """The colour of each branch in the masks. What is seen only through summaries is paler: it is
    most of the past."""
    colours = {name: to_rgb(PALETTE[name]) for name in (*BRANCHES, "masked")}
    colours["compressed"] = tuple(0.55 * c + 0.45 for c in colours["compressed"])
    return colours


def rgb(masks: Masks, causal: np.ndarray, branches: tuple[str, ...] = BRANCHES) -> np.ndarray:
    """Masks as one picture, uint8 `[rows, columns, 3]`: `branches` over one another, else the past
    grey and the future white."""
    colours = {
        name: np.round(255 * np.array(colour)).astype(np.uint8)
        for name, colour in picture_colours().items()
    }
    image = np.full((*causal.shape, 3), 255, dtype=np.uint8)
    image[causal] = colours["masked"]
    for name in BRANCHES:
        if name in branches:
            image[masks[name]] = colours[name]
    return image


# -- what it costs --


@dataclass(frozen=True)
class Item:
    """A line of a query's list.

    Attributes:
        branch: a name of `BRANCHES`.
        block: the block's id; None for the window and for the summaries.
        why: why the query reads it.
        first, last: positions of the tokens behind it, both included.
        keys: keys, or summaries, that the query reads there.
        bytes: of these keys and their values, loaded once for the group.
        flops: of the group's `G` heads.
    """

    branch: str
    block: int | None
    why: str
    first: int
    last: int
    keys: int
    bytes: int
    flops: int


@dataclass(frozen=True)
class Report:
    """What a mask shows and costs.

    Attributes:
        items: the list of one query.
        density: share of all causal pairs that the selected branch or the window sees token by
            token.
        query_density: the same for the one query.
        keys: by branch (`"compressed"`, `"selected"`, `"window"`), what each query loads `[N]`.
        branches: the cost of each branch over the whole sequence, one group of heads.
        cost: their sum.
        choice: the cost of choosing the blocks: the summaries' scores once more. It is in no
            branch.
        dense: the cost if every query loaded all of its past in the same way.
        tiled: the cost of a dense kernel in which `TILE` queries share their loads.
    """

    items: tuple[Item, ...]
    density: float
    query_density: float
    keys: dict[str, np.ndarray]
    branches: dict[str, Cost]
    cost: Cost
    choice: Cost
    dense: Cost
    tiled: Cost


def report(
    settings: Settings, masks: Masks, query: int, *, G: int = 4, D: int = 128, DV: int = 128
) -> Report:
    """Lists and prices what `masks` from `branch_masks` show, for `query` and for the whole
    sequence.

    Args:
        settings: that the masks were made with.
        masks: from `branch_masks`.
        query: the position whose list is made.
        G, D, DV: query heads of the group, widths of keys and values.
    """
    N = settings.N
    seen = masks["selected"] | masks["own block"] | masks["window"]
    keys = {
        "compressed": summary_visible(settings).sum(-1),
        "selected": (masks["selected"] | masks["own block"]).sum(-1),
        "window": masks["window"].sum(-1),
    }
    shape = {"N": N, "D": D, "DV": DV, "HQ": G, "H": 1, "itemsize": ITEMSIZE}
    branches = {
        name: costs.one_program_per_query(int(count.sum()), **shape) for name, count in keys.items()
    }
    lists = Cost(0, 4 * N * settings.top_n, 0)  # block ids, int32
    summaries = int(keys["compressed"].sum())
    read = (
        N * G * D + summaries * D
    ) * ITEMSIZE + 4 * N * G  # q, the summaries' keys, the log-sum-exp
    branches["selected"] = costs.total(branches["selected"], lists)
    return Report(
        items=tuple(_items(settings, masks, query, G, D, DV)),
        density=seen.sum() / costs.visible_pairs(N, N),
        query_density=seen[query].sum() / (query + 1),
        keys=keys,
        branches=branches,
        cost=costs.total(*branches.values()),
        choice=Cost(2 * G * summaries * D, read, 4 * N * settings.top_n),
        dense=costs.one_program_per_query(costs.visible_pairs(N, N), **shape),
        tiled=costs.tiled_attention(
            N, N, D, DV, tile_q=TILE, tile_k=TILE, HQ=G, H=1, itemsize=ITEMSIZE
        ),
    )


def _items(settings: Settings, masks: Masks, query: int, G: int, D: int, DV: int) -> list[Item]:
    def item(branch: str, block: int | None, why: str, first: int, last: int, keys: int) -> Item:
        return Item(
            branch,
            block,
            why,
            first,
            last,
            keys,
            keys * (D + DV) * ITEMSIZE,
            2 * G * keys * (D + DV),
        )

    listed = block_masks(settings, {"list": masks["selected"] | masks["own block"]})["list"][query]
    own, items = query // settings.block_size, []
    for block in np.flatnonzero(listed).tolist():
        first, last = block * settings.block_size, min((block + 1) * settings.block_size - 1, query)
        why = (
            "own"
            if block == own
            else "first"
            if block < settings.num_initial
            else "local"
            if block > own - settings.num_local
            else "score"
        )
        items.append(
            item(
                "own block" if block == own else "selected",
                block,
                why,
                first,
                last,
                last - first + 1,
            )
        )
    window = np.flatnonzero(masks["window"][query])
    items.append(item("window", None, "window", int(window[0]), query, len(window)))
    summaries = int(summary_visible(settings)[query].sum())
    if summaries:
        items.append(
            item(
                "compressed",
                None,
                "summaries",
                0,
                (summaries - 1) * settings.stride + settings.length - 1,
                summaries,
            )
        )
    return items


# -- all of it for some settings --


@functools.lru_cache(maxsize=8)
def _masks_of(settings: Settings) -> Masks:
    found = branch_masks(
        settings, importance(settings, source(settings.data, settings.N, settings.group).logits)
    )
    for mask in found.values():
        mask.setflags(write=False)
    return found


def explore(settings: Settings) -> tuple[Masks, Report]:
    """The masks and the report of these settings' own data."""
    data = source(settings.data, settings.N, settings.group)
    # the query changes no mask: leaving it out makes moving it fast
    masks = _masks_of(replace(settings, query=0))
    return masks, report(settings, masks, settings.query, G=len(data.logits), D=data.D, DV=data.DV)


def amount(x: float, unit: str = "") -> str:
    """A number of bytes or operations in three digits at most: `640 B`, `1.5 KiB`; `12.3 k`,
    `4.56 M` without a unit."""
    base, prefixes = (1024, ("", "Ki", "Mi", "Gi")) if unit else (1000, ("", "k", "M", "G"))
    power = 0
    while x >= 999.5 and power < 3:
        x, power = x / base, power + 1
    digits = 0 if x >= 99.5 or not power else 1 if x >= 9.95 else 2
    return f"{x:.{digits}f} {prefixes[power]}{unit}".rstrip()


def sentence(settings: Settings) -> str:
    """What there is to say: the query's list, then the whole sequence against dense attention."""
    found = explore(settings)[1]
    data, t = source(settings.data, settings.N, settings.group), settings.query
    listed = [str(item.block) for item in found.items if item.block is not None]
    if len(listed) > 8:
        listed[6:-1] = ["…"]
    loads = {name: int(count[t]) for name, count in found.keys.items()}
    where = f" ({_quote(data.text, t)})" if data.text else ""
    flops, moved = found.cost.flops / found.dense.flops, found.cost.bytes / found.dense.bytes
    told = (
        f"Query {t}{where} loads {sum(loads.values())} times where dense attention has "
        f"{_count(t + 1, 'key')}: "
        f"{_count(loads['selected'], 'key')} in its blocks ({', '.join(listed)}), "
        f"{loads['window']} in its window and "
        f"{_count(loads['compressed'], 'summary')}. One by one it sees {found.query_density:.0%} "
        "of its past, all queries together "
        f"{found.density:.0%} of theirs. For {len(data.logits)} heads on one KV head that is "
        f"{amount(found.cost.flops)}FLOP, "
        f"{flops:.0%} of dense, and {amount(found.cost.bytes, 'B')}, {moved:.0%} of dense where "
        "every query loads its own keys; "
        f"where {TILE} queries share them, dense moves {amount(found.tiled.bytes, 'B')}. "
        "Choosing the blocks comes "
        f"on top: {amount(found.choice.flops)}FLOP, {found.choice.flops / found.dense.flops:.0%} "
        "of dense, and "
        f"{amount(found.choice.bytes, 'B')}."
    )
    return f"{told} Out of range: {', '.join(settings.adjusted)}." if settings.adjusted else told


def _count(n: int, noun: str) -> str:
    plural = "summaries" if noun == "summary" else f"{noun}s"
    return f"{n} {noun if n == 1 else plural}"


def _quote(text: bytes, position: int) -> str:
    shown = text[max(position - 11, 0) : position + 1]
    return (
        "the last byte of “"
        + "".join(chr(b) if 32 < b < 127 else {32: "␣", 10: "↵"}.get(b, "·") for b in shown)
        + "”"
    )


# -- the picture --


def draw(settings: Settings | None = None, show: str = "all branches") -> Picture:
    """Tokens, blocks, and loads per query, all with queries downwards; beside them the list of the
    chosen query.

    Args:
        settings: None takes the defaults.
        show: a key of `SHOWN`; the branches that are coloured.
    """
    settings = settings or Settings()
    masks, found = explore(settings)
    figure, axes = new_figure(11.2, 5.2, columns=3, width_ratios=[4.0, 1.6, 1.6])
    figure.set_layout_engine(None)  # fixed margins: faster, and nothing jumps when a control moves
    figure.subplots_adjust(left=0.05, right=0.7, top=0.86, bottom=0.17, wspace=0.1)
    tokens, blocks, loads = axes[0]
    N, t = settings.N, settings.query

    causal = np.tri(N, dtype=bool)
    images = (
        (tokens, rgb(masks, causal, SHOWN[show]), N),
        (
            blocks,
            rgb(block_masks(settings, masks), causal[:, :: settings.block_size], SHOWN[show]),
            settings.NB,
        ),
    )
    for axis, image, columns in images:
        axis.imshow(image, aspect="auto", interpolation="nearest", extent=(0, columns, N, 0))
        axis.set_xlim(0, columns)
    _draw_loads(loads, found, SHOWN[show])
    for axis in (tokens, blocks, loads):
        axis.set_ylim(N, 0)
        axis.axhline(t + 0.5, color=PALETTE["query"], linewidth=1.2)
        axis.spines[["top", "right"]].set_visible(axis is not loads)
        axis.spines[:].set_color(PALETTE["faint"])
        axis.set_yticks(_ticks(N) if axis is tokens else [])
    tokens.set_xticks(_ticks(N))
    blocks.set_xticks(_ticks(settings.NB))
    for axis, title, label in (
        (tokens, "tokens", "key"),
        (blocks, f"blocks of {settings.block_size}", "block"),
        (loads, "loads per query", "keys and summaries"),
    ):
        axis.set_title(title, fontsize=10, y=1)
        axis.set_xlabel(label, fontsize=9)
    tokens.set_ylabel("query", fontsize=9)
    figure.figimage(
        _draw_list(settings, found, SHOWN[show]),
        1120 - LIST_WIDTH - 8,
        448 - LIST_HEIGHT,
        origin="upper",
    )
    figure.text(0.852, 0.876, f"query {t} reads", fontsize=10, ha="center", color=PALETTE["query"])

    names = {
        "own block": "own block",
        "selected": "selected",
        "window": "window",
        "compressed": "through summaries",
    }
    if show == "all branches":
        names |= {"window": "window, not selected", "compressed": "through summaries only"}
    handles = [
        Patch(color=picture_colours()[b], label=name)
        for b, name in names.items()
        if b in SHOWN[show]
    ]
    handles.append(Patch(color=picture_colours()["masked"], label="not seen"))
    handles.append(
        Line2D([], [], color=PALETTE["text"], linewidth=1.2, label="loads of dense attention")
    )
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0.04, 0),
        ncols=6,
        fontsize=9,
        frameon=False,
    )
    return Picture(figure, finding(settings, found, show))


def finding(settings: Settings, found: Report, show: str = "all branches") -> str:
    """The title: what the shown branches do of dense attention's arithmetic, and what choosing the
    blocks adds."""
    selected = f"{_count(settings.top_n, 'block')} of {settings.block_size}"
    branches, told = {
        "all branches": (found.branches, f"{selected}, window {settings.window}, summaries"),
        "compressed": (
            ["compressed"],
            f"Summaries of {settings.length} tokens, one every {settings.stride}",
        ),
        "selected": (["selected"], selected),
        "sliding window": (["window"], f"A window of {settings.window}"),
    }[show]
    share = sum(found.branches[name].flops for name in branches) / found.dense.flops
    told = f"{told}: {share:.0%} of dense attention's arithmetic at {settings.N} tokens"
    if "selected" not in branches:
        return told
    return f"{told}, choosing {found.choice.flops / found.dense.flops:.0%} more"


def _ticks(n: int) -> list[int]:
    """Round positions from 0 to `n`, at most six of them."""
    step = next(s for s in (1, 2, 4, 8, 16, 32, 64, 128) if n // s <= 5)
    return list(range(0, n + 1, step))


def _draw_loads(axis: Axes, found: Report, branches: tuple[str, ...]) -> None:
    """Loads of each query, stacked by branch, beside the line of dense attention."""
    colours, N = picture_colours(), len(found.keys["window"])
    edges = np.repeat(np.arange(N + 1), 2)[1:-1]  # each query is a step one row high
    left = np.zeros(2 * N)
    for name in ("selected", "window", "compressed"):
        if name in branches:
            right = left + np.repeat(found.keys[name], 2)
            axis.fill_betweenx(edges, left, right, color=colours[name], linewidth=0)
            left = right
    axis.plot([0, N], [0, N], color=PALETTE["text"], linewidth=1.2)
    axis.set_xlim(0, max(N, left.max()))
    axis.set_xticks(_ticks(N)[::2])


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
    lines = [("", ("id", "why", "tokens", "keys", "bytes", "FLOP"))]
    for item in blocks[:kept]:
        lines.append((item.branch, (str(item.block), item.why, *_cells([item]))))
    if rest := blocks[kept:-1]:
        lines.append(("selected", ("…", f"{len(rest)} more", *_cells(rest))))
    for item in blocks[kept:][-1:]:
        lines.append((item.branch, (str(item.block), item.why, *_cells([item]))))
    lines += [(item.branch, ("", item.why, *_cells([item]))) for item in others]
    lines.append(("", ("", "together", *_cells(items))))
    dense, one = settings.query + 1, found.items[0]
    price = (
        str(dense),
        amount(dense * one.bytes // one.keys, "B"),
        amount(dense * one.flops // one.keys),
    )
    return [*lines, ("", ("", "dense", f"0–{settings.query}", *price))]


def _cells(items: Sequence[Item]) -> tuple[str, ...]:
    keys, loaded, flops = (
        sum(getattr(item, name) for item in items) for name in ("keys", "bytes", "flops")
    )
    span = f"{items[0].first}–{items[0].last}" if len(items) == 1 else ""
    return span, str(keys), amount(loaded, "B"), amount(flops)


def _draw_list(settings: Settings, found: Report, branches: Sequence[str]) -> np.ndarray:
    """The table as pixels, uint8 `[rows, columns, 3]`. Matplotlib would take longer for its letters
    than for all of the masks."""
    image = Image.new("RGB", (LIST_WIDTH, LIST_HEIGHT), SURFACE)
    pen, font = ImageDraw.Draw(image), ImageFont.truetype(findfont("DejaVu Sans Mono"), 11)
    lines, step, y = table(settings, found, branches), 18, 4
    for number, (branch, cells) in enumerate(lines):
        if number == len(lines) - 2:
            y += 7
            pen.line((18, y - 4, LIST_WIDTH, y - 4), fill=PALETTE["faint"])
        if branch:
            colour = tuple(round(255 * c) for c in picture_colours()[branch])
            pen.rectangle((2, y + 2, 11, y + 11), fill=colour)
        pen.text(
            (18, y),
            "{:>3} {:<9} {:>7}  {:>4}  {:>8} {:>6}".format(*cells),
            fill=PALETTE["text"],
            font=font,
        )
        y += step
        if number == 0:
            pen.line((18, y - 2, LIST_WIDTH, y - 2), fill=PALETTE["faint"])
    return np.asarray(image)


# -- saving it --


def file_name(settings: Settings, show: str = "all branches") -> str:
    """A name for the picture of these settings, different for different ones."""
    data = {SYNTHETIC: "synthetic", REAL: "heads"}[settings.data] + str(settings.group)
    parts = (
        f"mask_{data}_N{settings.N}_block{settings.block_size}_top{settings.top_n}"
        f"_first{settings.num_initial}",
        f"local{settings.num_local}_window{settings.window}"
        f"_summary{settings.length}by{settings.stride}_query{settings.query}",
    )
    return (
        "_".join(parts) + ("" if show == "all branches" else f"_{show.replace(' ', '-')}") + ".png"
    )


def export(settings: Settings, show: str = "all branches", folder: Path | str = ".") -> Path:
    """Write the picture of these settings into `folder`, over an older one of the same name, and
    return where it is."""
    path = Path(folder) / file_name(settings, show)
    path.write_bytes(draw(settings, show).png())
    return path


# -- the interactive --


def mask_explorer() -> Panel:
    """The interactive: controls in three columns, sentence, picture, and a button that saves it in
    the working directory."""
    start = Settings()

    def render(show: str, **values: object) -> tuple[Picture, str]:
        settings = Settings(**values)
        return draw(settings, show), sentence(settings)

    def slider(
        name: str, low: int, high: int, text: str, step: int = 1, live: bool = False
    ) -> ipywidgets.IntSlider:
        return ipywidgets.IntSlider(
            getattr(start, name), low, high, step, description=text, continuous_update=live
        )

    def powers(name: str, text: str) -> ipywidgets.SelectionSlider:
        return ipywidgets.SelectionSlider(
            options=POWERS, value=getattr(start, name), description=text, continuous_update=False
        )

    groups = range(max(groups for groups, _ in sources().values()))
    explorer = panel(
        "which keys, which blocks, at what price",
        render,
        data=ipywidgets.Dropdown(options=list(sources()), value=start.data, description="scores"),
        group=ipywidgets.Dropdown(
            options=list(groups), value=start.group, description="head group"
        ),
        show=ipywidgets.Dropdown(options=list(SHOWN), description="show"),
        N=slider("N", 16, MAX_N, "tokens", step=8),
        query=slider("query", 0, MAX_N - 1, "query", live=True),
        window=slider("window", 1, 256, "window"),
        block_size=powers("block_size", "block size"),
        top_n=slider("top_n", 1, 32, "blocks listed (top-n)"),
        num_initial=slider("num_initial", 0, 8, "first blocks forced"),
        num_local=slider("num_local", 0, 8, "local blocks forced"),
        length=powers("length", "summary length"),
        stride=powers("stride", "summary stride"),
    )
    save, saved = ipywidgets.Button(description="Save as PNG"), ipywidgets.HTML()

    def on_click(_button: ipywidgets.Button) -> None:
        values = {name: control.value for name, control in explorer.controls.items()}
        show = values.pop("show")
        saved.value = f"Saved as {export(Settings(**values), show).name}"

    save.on_click(on_click)
    for control in explorer.controls.values():
        control.layout.width = "auto"
    columns = ipywidgets.Layout(
        grid_template_columns="repeat(3, minmax(0, 1fr))", grid_gap="0 24px", max_width="1120px"
    )
    message, image = explorer.children[-2:]
    explorer.children = (
        ipywidgets.GridBox(list(explorer.controls.values()), layout=columns),
        message,
        image,
        ipywidgets.HBox([save, saved]),
    )
    return explorer
