"""Pictures of chapter 19: the masks of two dials, what a mean hides, what was found on the recall
task by the position of the dials, and what choosing costs.

Runs come from `python -m nsa_tutorial.training.capstone.record after`, which names its machine.
`explore` is the interactive, `draw_position` its picture.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import ipywidgets
import numpy as np
import torch
from matplotlib.patches import Patch
from torch import Tensor

from nsa_tutorial.course import heads
from nsa_tutorial.course import indexing_costs as costs
from nsa_tutorial.course.costs import selected_keys as attended_keys
from nsa_tutorial.course.figures import INKS, PALETTE, Picture, new_figure
from nsa_tutorial.course.sheet import Place, Sheet, byte_colour
from nsa_tutorial.course.widgets import Panel, panel
from nsa_tutorial.sparse.block_selection import choose

FILE = Path(__file__).resolve().parents[3] / "assets" / "after_nsa.json"
TOKENS = FILE.with_name("tokens_h200.json")
CHOOSERS = ("mean keys", "an indexer")
GROUP, LATER = 3, 256  # the KV head that looks far, and its first query that counts
# the colour of who chooses, in all pictures but the masks; lines of single tokens are dashed
COLOURS = {"mean keys": "compressed", "an indexer": "selected"}

# a variant of the recording, what a picture calls it, and its colour: that of who chooses
NAMES = {
    "dense": ("dense", "key"),
    "nsa": ("NSA, three branches", "compressed"),
    "top": ("tokens by all scores", "value"),
    "dsa": ("tokens by an indexer", "selected"),
    "msa": ("blocks by an indexer", "selected"),
    "moba": ("blocks by mean keys", "compressed"),
    "any": ("blocks at random", "line"),
}
OF_TOKENS = ("top", "dsa")


# -- one real group of heads --


@functools.cache
def _group() -> tuple[Tensor, Tensor, Tensor]:
    """Scores `[G, N, N]` and the mean attention `[N, N]` of a group, and its keys `[N, D]`."""
    h = heads.load()
    q, k = h.q[0, :, GROUP * h.G : (GROUP + 1) * h.G], h.k[0, :, GROUP]
    s = torch.einsum("nhd,md->hnm", q, k) * k.shape[-1] ** -0.5
    is_hidden = torch.arange(len(k)) > torch.arange(len(k))[:, None]
    return s, s.masked_fill(is_hidden, -torch.inf).softmax(-1).mean(0), k


@functools.cache
def mask(unit: int, chooser: str, budget: int = 64) -> tuple[Tensor, float]:
    """The tokens `[N, N]` that the queries of the group read, and the share of their attention that
    this holds, as a mean over the later half. Mean keys: each head's softmax over its scores with
    the blocks' mean keys, added up over the heads. The indexer is a perfect one: its scores are the
    attention itself."""
    s, p, _ = _group()
    N = len(p)
    is_past = torch.arange(N) <= torch.arange(N)[:, None]
    own = torch.arange(N) // unit
    if chooser == "an indexer":
        score = p.masked_fill(~is_past, 0).unflatten(1, (-1, unit)).amax(-1)
    else:
        is_later = torch.arange(N // unit) > own[:, None]
        score = s.unflatten(2, (-1, unit)).mean(-1).masked_fill(is_later, -torch.inf)
        score = score.softmax(-1).sum(0)
    ids = choose(score[None, :, None], own, top_n=budget // unit, num_initial=0, num_local=1)
    ids = ids[0, :, 0].long()
    listed = torch.zeros(N, N // unit + 1, dtype=torch.bool)
    listed.scatter_(1, ids.where(ids >= 0, N // unit), True)
    seen = listed[:, :-1].repeat_interleave(unit, 1) & is_past
    return seen, (p * seen)[LATER:].sum(1).mean().item()


def _image(unit: int, chooser: str) -> np.ndarray:
    """A mask in the course's colours, `[queries of the later half, N, 3]`."""
    seen = mask(unit, chooser)[0][LATER:]
    t = torch.arange(LATER, LATER + len(seen))[:, None]
    key = torch.arange(seen.shape[1])
    image = np.full((*seen.shape, 3), 255, dtype=np.uint8)
    image[(key <= t).numpy()] = byte_colour("masked")
    image[seen.numpy()] = byte_colour("selected")
    image[(seen & (key >= t // unit * unit)).numpy()] = byte_colour("own block")
    return image


def draw_dials() -> Picture:
    """The two dials as four masks of one group of heads."""
    figure, axes = new_figure(9.2, 5.0, columns=2, rows=2)
    for row, unit in enumerate((16, 1)):
        for column, chooser in enumerate(CHOOSERS):
            axis = axes[row, column]
            axis.imshow(_image(unit, chooser), interpolation="none", aspect="auto",
                        extent=(0, 512, 512, LATER))  # fmt: skip
            what = "4 blocks of 16" if unit == 16 else "64 tokens"
            share = mask(unit, chooser)[1]
            axis.set_title(f"{what} by {chooser} hold {share:.0%}", fontsize=10)
            axis.set_xticks([] if row == 0 else [0, 256, 512])
            axis.set_yticks([] if column else [256, 512])
        axes[row, 0].set_ylabel("query", fontsize=9)
    for axis in axes[1]:
        axis.set_xlabel("key", fontsize=9)
    colours = {"chosen": "selected", "the query's own": "own block", "not read": "masked"}
    patches = [Patch(color=PALETTE[colour], label=name) for name, colour in colours.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    blocks, tokens = (mask(unit, "an indexer")[1] for unit in (16, 1))
    return Picture(
        figure,
        f"64 tokens as 4 blocks hold {mask(16, 'mean keys')[1]:.0%} to {blocks:.0%} of this "
        f"group's attention, as single tokens {tokens:.0%}",
    )


# -- a maximum is not a mean --


def needle(blocks: int = 8, block_size: int = 16, at: int = 41, height: float = 5.0) -> Tensor:
    """Scores of tokens: noise, a needle, and around it a block of low scores."""
    g = torch.Generator().manual_seed(3)
    scores = 0.7 * torch.randn(blocks * block_size, generator=g)
    first = at // block_size * block_size
    scores[first : first + block_size] -= 0.9
    scores[at] = height
    return scores


def draw_needle() -> Picture:
    """Scores of tokens, and what a block's mean, maximum and attention say of them."""
    scores = needle()
    of_block = scores.view(8, 16)
    share = scores.softmax(0).view(8, 16).sum(1)
    figure, axes = new_figure(9.2, 3.6, columns=3, rows=2, height_ratios=(1.25, 1))
    top = axes[0, 0].get_gridspec()
    for axis in axes[0]:
        axis.remove()
    axis = figure.add_subplot(top[0, :])
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=9, colors=PALETTE["text"])
    colours = [PALETTE["query"] if i == 41 else PALETTE["key"] for i in range(128)]
    axis.bar(range(128), scores.tolist(), 0.9, color=colours)
    for edge in range(16, 128, 16):
        axis.axvline(edge - 0.5, color=PALETTE["faint"], linewidth=0.8, linestyle=":")
    axis.set(ylabel="score", xlim=(-1, 128))
    axis.set_xticks([16 * b + 7.5 for b in range(8)], [f"block {b}" for b in range(8)])
    axis.text(42, 4.3, "needle", fontsize=9)
    rows = {"mean": of_block.mean(1), "maximum": of_block.amax(1), "attention": share}
    ranks = {}
    for axis, (name, values) in zip(axes[1], rows.items(), strict=True):
        best = int(values.argmax())
        ranks[name] = int((values > values[2]).sum()) + 1
        colours = [PALETTE["selected" if b == best else "masked"] for b in range(8)]
        axis.bar(range(8), values.tolist(), 0.8, color=colours)
        axis.set_title(f"{name}: block {best} is best", fontsize=10)
        axis.set_xticks(range(8))
        axis.axhline(0, color=PALETTE["faint"], linewidth=0.8)
    return Picture(
        figure,
        f"The block with the needle has rank {ranks['mean']} of 8 by its mean, rank "
        f"{ranks['maximum']} by its maximum, and holds {share[2]:.0%} of the attention",
    )


# -- the recording --


@functools.cache
def recording() -> dict:
    """What was recorded."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def budgets() -> list[int]:
    """Blocks of a list in the recording, the most first."""
    return sorted({r["blocks"] for r in recording()["rows"]}, reverse=True)


def rows(attention: str, blocks: int | None = None) -> list[dict]:
    """The runs of a variant with lists of so many blocks, or as many tokens, by seed; None is the
    longest list."""
    blocks = budgets()[0] if blocks is None else blocks
    found = [r for r in recording()["rows"] if (r["attention"], r["blocks"]) == (attention, blocks)]
    return sorted(found, key=lambda r: r["seed"])


def mean(attention: str, what: str, blocks: int | None = None) -> float:
    """A number that the runs of a variant found at their end, the mean over the seeds."""
    values = [r["found"][what] for r in rows(attention, blocks)]
    return sum(values) / len(values)


def block_size() -> int:
    """Of the recording."""
    return recording()["rows"][0]["settings"]["block_size"]


def told() -> str:
    """What the recording is."""
    data = recording()
    s, seeds = rows("msa")[0]["settings"], len(rows("msa"))
    return (
        f"{data['machine']}, PyTorch {data['versions']['torch']}: texts of {s['length']} tokens, "
        f"{s['steps']} steps of {s['batch']} texts, {seeds} seed{'s' * (seeds > 1)}"
    )


def draw_race() -> Picture:
    """Far answers found, by variant and by the tokens of a list, a dot for each seed."""
    figure, axes = new_figure(9.2, 3.3, columns=len(budgets()))
    for axis, blocks in zip(axes[0], budgets(), strict=True):
        listed = {name: None if name == "dense" else blocks for name in NAMES}  # dense has no list
        names = [name for name in NAMES if rows(name, listed[name])]
        for y, name in enumerate(names):
            found, colour = rows(name, listed[name]), NAMES[name][1]
            values, share = [r["found"]["far"] for r in found], mean(name, "far", listed[name])
            axis.barh(y, share, 0.6, color=PALETTE[colour], alpha=0.45,
                      hatch="//" if name == "nsa" else None)  # fmt: skip
            axis.plot(values, [y] * len(values), "o", color=PALETTE[colour], markersize=5.5,
                      markeredgecolor=PALETTE["text"], markeredgewidth=0.6)  # fmt: skip
            axis.text(max(values) + 0.03, y, f"{share:.0%}", va="center", fontsize=9.5)
        axis.set_yticks(range(len(names)), [NAMES[n][0] for n in names], fontsize=9)
        axis.set(ylim=(len(names) - 0.5, -0.5), xlim=(0, 1.18), xlabel="far answers found")
        axis.set_xticks([0, 0.5, 1], ["0", "50 %", "100 %"])
        axis.set_title(
            f"{blocks} blocks of {block_size()}, or {block_size() * blocks} tokens", fontsize=10
        )
    tokens = block_size() * budgets()[0]
    blocks, single, means = (f"{mean(name, 'far'):.0%}" for name in ("msa", "dsa", "moba"))
    return Picture(
        figure,
        f"Far answers found with {tokens} tokens: an indexer's blocks {blocks}, its tokens "
        f"{single}, blocks by mean keys {means}",
    )


def draw_learning(blocks: int | None = None) -> Picture:
    """Hits of the lists, and far answers found, as the variants learn; the last point is the final
    evaluation, on more texts than those on the way."""
    figure, axes = new_figure(9.2, 3.1, columns=2)
    for axis, (place, name) in zip(
        axes[0], ((2, "lists that hold the answer"), (1, "far answers found")), strict=True
    ):
        for variant in ("dense", "top", "dsa", "msa", "moba", "any"):
            if variant == "dense" and place == 2:
                continue  # without lists
            label, colour = NAMES[variant]
            runs = rows(variant, None if variant == "dense" else blocks)
            step = [point[0] for point in runs[0]["progress"]]
            values = np.array([[point[place] for point in r["progress"]] for r in runs])
            values[:, -1] = [r["found"]["hits" if place == 2 else "far"] for r in runs]
            axis.fill_between(step, values.min(0), values.max(0), color=PALETTE[colour], alpha=0.2,
                              linewidth=0)  # fmt: skip
            style = ":" if variant == "dense" else "--" if variant in OF_TOKENS else "-"
            axis.plot(step, values.mean(0), style, color=PALETTE[colour], linewidth=1.9,
                      label=label, zorder=3 if variant == "dense" else 2)  # fmt: skip
        axis.set(xlabel="step", ylim=(-0.03, 1.05), title=name)
        axis.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    axes[0, 1].legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.02, 0.5))
    tokens = block_size() * (budgets()[0] if blocks is None else blocks)
    last = [mean(v, "far", blocks) for v in ("msa", "moba")]
    return Picture(
        figure,
        f"Far answers found with {tokens} tokens: blocks by an indexer come to {last[0]:.0%}, "
        f"blocks by mean keys to {last[1]:.0%}",
    )


def draw_live(hits: dict[str, Sequence[float]], chance: dict[str, float], every: int) -> Picture:
    """Hits of short runs: by variant, after every so many steps, and what chance would find in the
    places of its lists that are free."""
    figure, axes = new_figure(7.6, 2.8)
    axis = axes[0, 0]
    for variant, values in hits.items():
        label, colour = NAMES[variant]
        axis.plot([every * i for i in range(len(values))], values, "o-", color=PALETTE[colour],
                  markersize=4, label=label)  # fmt: skip
        axis.axhline(chance[variant], color=PALETTE[colour], linestyle=":", linewidth=1.6)
        axis.text(1.01, chance[variant], f"chance {chance[variant]:.0%}", fontsize=9, va="center",
                  color=INKS[colour], transform=axis.get_yaxis_transform())  # fmt: skip
    axis.set(xlabel="step", ylim=(0, 1.05), ylabel="far questions whose list is a hit")
    axis.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    axis.legend(frameon=False, fontsize=9, loc="upper left")
    said = ", ".join(f"{NAMES[v][0]} {values[-1]:.0%}" for v, values in hits.items())
    return Picture(figure, f"Hits at the end: {said}")


# -- lists of single tokens on a GPU --


@functools.cache
def token_times() -> dict[tuple[int, str, str], float]:
    """Milliseconds by tokens, direction and kernel: of lists of single tokens in both languages,
    and of dense attention."""
    rows = json.loads(TOKENS.read_text())["rows"]
    return {(row["tokens"], row["direction"], row["kernel"]): row["ms"] for row in rows}


def token_rate(tokens: int, kernel: str) -> float:
    """TFLOP/s of the two products of a kernel's forward."""
    row = json.loads(TOKENS.read_text())["rows"][0]
    listed = row["slots"] if kernel in ("triton", "tilelang") else tokens
    keys = attended_keys(tokens, tokens, block_size=1, top_n=listed)
    flops = 2 * 2 * row["width"] * row["kv_heads"] * row["group"] * keys
    return flops / token_times()[tokens, "forward", kernel] / 1e9


def tokens_table() -> list[str]:
    """`token_times` as lines of text."""
    told, ms = json.loads(TOKENS.read_text()), token_times()
    row = told["rows"][0]
    kernels = {"triton": "Triton", "tilelang": "TileLang", "dense, cuDNN": "cuDNN, dense"}
    versions = {name: told[name] for name in ("torch", "triton", "tilelang")}
    lines = [", ".join([told["machine"], *(f"{name} {x}" for name, x in versions.items())]),
             f"bf16, {row['kv_heads'] * row['group']} heads over {row['kv_heads']}, width "
             f"{row['width']}, {row['slots']:,} random tokens a query: milliseconds",
             f"{'tokens':>6}  {'':9}" + "".join(f"{x:>14}" for x in kernels.values())]  # fmt: skip
    for tokens, direction in dict.fromkeys((n, d) for n, d, _ in ms):
        cells = (f"{ms[tokens, direction, kernel]:14.1f}" for kernel in kernels)
        lines.append(f"{tokens:6,}  {direction:9}" + "".join(cells))
    return lines


# -- costs --


def _amount(x: float) -> str:
    """Operations in words."""
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if x >= unit:
            return f"{x / unit:.3g} {name}FLOP"
    return f"{x:.0f} FLOP"


def _read(x: float) -> str:
    """MiB in words."""
    return f"{x / 1024:.3g} GiB" if x >= 1000 else f"{x:.3g} MiB"


def length_name(N: int) -> str:
    """8k, 1M."""
    return f"{N >> 10}k" if N < 1 << 20 else f"{N >> 20}M"


def draw_costs() -> Picture:
    """Operations of a text's last query, by its length: attending, choosing, and dense."""
    figure, axes = new_figure(8.8, 3.5, columns=2, width_ratios=(1.7, 1))
    axis, legend = axes[0]
    lengths = [1 << e for e in range(13, 21)]
    lines = {
        "dense attention": ("key", "-", lambda N: costs.DENSE.query(N).attending),
        "choosing tokens by their keys": (
            COLOURS["mean keys"], "--", lambda N: costs.dials(1, "mean keys").query(N).choosing),
        "choosing by an indexer": (
            COLOURS["an indexer"], "-", lambda N: costs.dials(128, "an indexer").query(N).choosing),
        "choosing blocks by mean keys": (
            COLOURS["mean keys"], "-", lambda N: costs.dials(128, "mean keys").query(N).choosing),
        "attending to 2,048 tokens": (
            "text", ":", lambda N: costs.dials(128, "mean keys").query(N).attending),
    }  # fmt: skip
    for i, (name, (colour, style, of)) in enumerate(lines.items()):
        axis.plot(lengths, [of(N) / 1e6 for N in lengths], style, color=PALETTE[colour],
                  linewidth=2)  # fmt: skip
        legend.plot([0, 0.12], [-i, -i], style, color=PALETTE[colour], linewidth=2.4)
        legend.text(0.17, -i, name, va="center", fontsize=9)
    legend.axis("off")
    legend.set(xlim=(0, 1.3), ylim=(-5.5, 1.5))
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = [1 << e for e in (13, 16, 18, 20)]
    axis.set_xticks(ticks, [length_name(N) for N in ticks])
    axis.set(xlabel="tokens of the text", ylabel="MFLOP of the last query")
    indexed = costs.dials(128, "an indexer")
    meet = next(N for N in lengths if indexed.query(N).share_of_choosing > 0.5) // 2
    last = indexed.query(1 << 20)
    return Picture(
        figure,
        f"Past {length_name(meet)} tokens, an indexer works more than the attention that it "
        f"serves; at 1M, {last.choosing / last.attending:.0f} times as much",
    )


# -- the panel --

UNITS = {"blocks of 128": 128, "blocks of 64": 64, "tokens": 1}


def sentence(unit: str, chooser: str, tokens: int) -> str:
    """What the explorer says."""
    q, dense = (m.query(tokens) for m in (costs.dials(UNITS[unit], chooser), costs.DENSE))
    all_of = q.choosing + q.attending
    return (
        f"{length_name(tokens)} tokens, {unit} by {chooser}: choosing takes "
        f"{_amount(q.choosing)}, attending {_amount(q.attending)}, so {q.share_of_choosing:.0%} is "
        f"choice; dense attention would take {dense.attending / all_of:.1f} times as much. For "
        f"each KV head, 2,048 keys lie in {q.runs:,} stretches of memory."
    )


def draw_position(
    unit: str = "blocks of 128", chooser: str = "an indexer", tokens: int = 1 << 17
) -> Picture:
    """One position of the dials: a mask of the real group, operations and bytes."""
    sheet, size = Sheet(8.5, 3.0), UNITS[unit]
    small = {128: 32, 64: 16, 1: 1}[size]  # of the 512 tokens of the real text
    place = Place(0.55, 0.62, 3.4, 1.7)
    sheet.image(place, _image(small, chooser))
    what = f"blocks of {small} in place of {size}" if small > 1 else "single tokens"
    sheet.title(place, f"64 of 512 real tokens a query, {what}")
    sheet.below(place, {0: 0, 0.5: 256, 1: 512}, "key")
    sheet.beside(place, {0: 256, 1: 512}, "query")
    q, dense = (m.query(tokens) for m in (costs.dials(size, chooser), costs.DENSE))
    bars = (
        ("FLOP of the last query", q.choosing, q.attending, dense.attending, _amount),
        ("bytes read for it", q.read_to_choose / 2**20, q.read_to_attend / 2**20,
         dense.read_to_attend / 2**20, _read),
    )  # fmt: skip
    scales = ((3e5, 3.5e10), (0.02, 2048))  # the same at all positions, to compare bars
    for i, (title, choosing, attending, whole, said) in enumerate(bars):
        chart = sheet.chart(Place(5.05, 0.62 + 1.2 * i, 2.2, 0.72), (0, 8), (-0.5, 2.5))
        chart.title(title)
        names = (("choosing", choosing, COLOURS[chooser]), ("attending", attending, "text"),
                 ("dense", whole, "key"))  # fmt: skip
        smallest, largest = scales[i]

        def across(value: float, smallest: float = smallest, largest: float = largest) -> float:
            return 8 * math.log10(max(value, smallest) / smallest) / math.log10(largest / smallest)

        tens = [10.0**e for e in range(-1, 11) if smallest < 10.0**e < largest]
        chart.boxes([(across(ten) - 0.01, -0.5, 0.02, 3) for ten in tens], "masked")
        for y, (name, value, colour) in enumerate(names):
            chart.boxes([(across(value) - 0.12, 2 - y - 0.25, 0.24, 0.5)], colour)
            chart.words([(0, 2 - y, f"{name} ")], size=8.5, ha="right")
            chart.words([(8, 2 - y, f" {said(value)}")], size=8.5, ha="left")
    sheet.words([(6.15, 2.85, "from one grey line to the next: ten times as much")], size=8.5)
    return Picture(sheet.figure, f"{unit} by {chooser}, {length_name(tokens)} tokens")


def explore() -> Panel:
    """The interactive: the two dials and the length → mask, operations, bytes."""

    def render(unit: str, chooser: str, tokens: int) -> tuple[Picture, str]:
        return draw_position(unit, chooser, tokens), sentence(unit, chooser, tokens)

    return panel(
        "two dials",
        render,
        unit=ipywidgets.ToggleButtons(options=tuple(UNITS), value="blocks of 128",
                                      description="what"),
        chooser=ipywidgets.ToggleButtons(options=CHOOSERS, value="an indexer", description="who"),
        tokens=ipywidgets.SelectionSlider(
            options=[(length_name(1 << e), 1 << e) for e in range(13, 21)], value=1 << 17,
            description="tokens",
        ),
    )  # fmt: skip
