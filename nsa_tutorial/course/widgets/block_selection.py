"""Chapter 07's pictures: which summaries lie in a block, where cheap scores send a query, and how
much attention the lists hold.

`tiny` makes the example by hand. On the stored heads, `lists` chooses blocks in four ways, and
`captured` and `blocks_loaded` judge a choice, all by the same queries. `draw_lists`
shows a reader's wrong list, the other functions `draw_…` what the chapter tells, and `explore` puts
controls on `draw_choice`.

Symbols: `N` positions, `HQ` query heads, `H` key/value heads, `G = HQ // H`, `NB` blocks of `BS`
keys, `n` slots of a list.
"""

from __future__ import annotations

import functools
from itertools import product
from typing import NamedTuple

import ipywidgets
import numpy as np
import torch
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.course import heads as stored_heads
from nsa_tutorial.course.figures import INKS, PALETTE, Picture, new_figure, shades
from nsa_tutorial.course.heads import Heads
from nsa_tutorial.course.sheet import Place, Sheet, byte_colour, bytes_of
from nsa_tutorial.course.widgets import Panel, panel
from nsa_tutorial.exact.dense_attention import attention
from nsa_tutorial.exact.grouped_query_attention import expand_kv_heads
from nsa_tutorial.sparse import block_selection
from nsa_tutorial.sparse.compression import summary_rows
from nsa_tutorial.sparse.selected_attention import query_rows

BS = 16
SINCE = 256  # choices are judged by the queries from here on: each sees more than 16 blocks
SOURCES = ("oracle", "summaries", "latest", "random")
SIZES = ((4, 4), (8, 4), (8, 8), (16, 8), (16, 16), (32, 16))  # (length, stride) of the summaries
_FORCED = 4  # blocks of either kind that the panel can force
_COLOURS = {"oracle": "text", "summaries": "compressed", "latest": "window", "random": "faint"}
_TITLES = {
    "oracle": "oracle: the best blocks",
    "summaries": "chosen by summaries",
    "latest": "the latest blocks",
    "random": "chance",
}


# -- the example by hand --


def tiny() -> tuple[Tensor, Tensor, Tensor]:
    """32 tokens in 4 blocks of 8: `q [1, 32, 2, 2]`, `k [1, 32, 1, 2]`, `v [1, 32, 1, 1]`, two
    heads on one KV head.

    All queries are the same. Head 0 looks for the first number of a key, head 1 for the second.
    Tokens 10 to 13 (in block 1) offer 4 of the first, tokens 18 to 21 (in block 2) offer 3 of the
    second. A value is the number of its block.
    """
    q = torch.eye(2).expand(1, 32, 2, 2)
    k = torch.zeros(1, 32, 1, 2)
    k[:, 10:14, :, 0], k[:, 18:22, :, 1] = 4.0, 3.0
    v = (torch.arange(32) // 8).float().view(1, 32, 1, 1)
    return q, k, v


class Step(NamedTuple):
    """The last token of `tiny` asks with one head, `q = [1 - a, a]`, and may read 2 of 4 blocks,
    its own among them.

    Attributes:
        ids: its list.
        o: what selected attention gives.
        dense: what attention to all tokens gives.
        slope: the derivative of `o` with respect to `a`, from autograd.
    """

    ids: list[int]
    o: float
    dense: float
    slope: float


@functools.cache
def turn(a: float) -> Step:
    """Turn the query of `Step` from what block 1 offers (`a = 0`) to what block 2 offers
    (`a = 1`)."""
    _, k, v = tiny()
    at = torch.tensor(a, requires_grad=True)
    q = torch.stack([1 - at, at]).view(1, 1, 1, 2)
    k_cmp = ops.compress(k, length=4, stride=2)
    sizes = {"block_size": 8, "length": 4, "stride": 2, "num_keys": 32, "scale": 1.0}
    ids = ops.select_blocks(q, k_cmp, top_n=2, num_initial=0, num_local=1, **sizes)
    o = ops.selected_attention(q, k, v, ids, block_size=8, scale=1.0)
    (slope,) = torch.autograd.grad(o.sum(), at)
    dense = attention(q.detach(), k, v, scale=1.0)
    return Step(ids[0, 0, 0].tolist(), o.item(), dense.item(), slope.item())


# -- choosing on the stored heads --


@functools.cache
def real() -> tuple[Heads, Tensor]:
    """The stored heads, and how much of each query's attention each block holds, `[HQ, N, NB]` in
    fp64."""
    stored = stored_heads.load()
    return stored, stored_heads.block_mass(
        stored_heads.attention_weights(stored.q, stored.k)[0], BS
    )


@functools.cache
def scores(by: str, length: int = 8, stride: int = 4, shared: bool = True) -> Tensor:
    """What each block is worth to each query, `[N, H, NB]`, or `[N, HQ, NB]` where each head scores
    for itself.

    Args:
        by: `"oracle"`, the true attention; `"summaries"`, the importance of Eq. 9; `"latest"`, the
            later the better; `"random"`.
        length, stride: of the summaries, which are mean keys.
        shared: add up the heads of a group (Eq. 10).
    """
    stored, mass = real()
    (HQ, N, NB), H = mass.shape, stored.k.shape[2]
    lists_per_query = H if shared else HQ
    if by == "oracle":
        return (mass.unflatten(0, (H, stored.G)).sum(1) if shared else mass).transpose(0, 1)
    if by == "latest":
        return torch.arange(NB).expand(N, lists_per_query, NB).double()
    if by == "random":
        return torch.rand(
            N, lists_per_query, NB, generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )
    if by != "summaries":
        raise ValueError(f"by: got {by!r}, expected one of {', '.join(SOURCES)}")
    k = stored.k if shared else expand_kv_heads(stored.k, stored.G)
    k_cmp = ops.compress(k, length=length, stride=stride)
    rows = summary_rows(query_rows(1, N, N, causal=True, cu_seqlens=None, device=k.device), N,
    length=length, stride=stride,
                        cu_seqlens=None)  # fmt: skip
    overlap = block_selection.overlap_weights(length, stride, BS, NB)
    return block_selection.importance(
        stored.q, k_cmp, rows, overlap=overlap, scale=k.shape[-1] ** -0.5
    )[0]


@functools.lru_cache(maxsize=64)
def lists(
    by: str,
    n: int,
    *,
    num_initial: int = 0,
    num_local: int = 0,
    length: int = 8,
    stride: int = 4,
    shared: bool = True,
) -> Tensor:
    """The blocks that each query of the stored heads attends to, `[N, H, n]`, or `[N, HQ, n]` where
    each head chooses for itself.

    Args:
        by, length, stride, shared: as for `scores`.
        n: slots of a list.
        num_initial, num_local: how many of the first and of the latest blocks are forced; by
            default none.
    """
    score = scores(by, length, stride, shared)
    own = torch.arange(len(score)) // BS
    return block_selection.choose(
        score[None], own, top_n=n, num_initial=num_initial, num_local=num_local
    )[0]


# -- judging a choice --


def listed(ids: Tensor) -> Tensor:
    """Bool `[HQ, N, NB]`: which blocks are in the list of which head and query."""
    HQ, N, NB = real()[1].shape
    slot = torch.where(ids >= 0, ids, NB).long()
    found = torch.zeros(N, ids.shape[1], NB + 1, dtype=torch.bool).scatter_(-1, slot, True)[
        ..., :NB
    ]
    return found.transpose(0, 1).repeat_interleave(HQ // ids.shape[1], 0)


def captured(ids: Tensor) -> Tensor:
    """The share of attention that the lists hold, `[HQ]`, averaged over the queries from `SINCE`
    on."""
    return (real()[1] * listed(ids)).sum(-1)[:, SINCE:].mean(-1)


def blocks_loaded(ids: Tensor) -> Tensor:
    """How many different blocks the heads of a group load, `[H]`, averaged over the queries of
    `captured`."""
    together = listed(ids)[:, SINCE:].unflatten(0, (-1, real()[0].G)).any(1)  # [H, queries, NB]
    return together.sum(-1).double().mean(-1)


# -- which summaries lie in a block --


def draw_overlap(
    length: int = 32, stride: int = 16, block_size: int = 64, block: int = 1
) -> Picture:
    """One block and the summaries around it; what lies inside the block is coloured, and its pieces
    of `stride` are counted."""
    first, weights = block_selection.overlap_weights(length, stride, block_size, block + 1)
    first, weights = int(first[block]), weights[block][weights[block] > 0].tolist()
    first, weights = max(first, 0), weights[max(-first, 0) :]  # none begins before token 0
    shown = range(max(first - 1, 0), first + len(weights) + 1)
    start, end = block * block_size, (block + 1) * block_size
    figure, axes = new_figure(8.0, 0.9 + 0.3 * len(shown))
    axis = axes[0, 0]
    axis.axvspan(start, end, color=PALETTE["selected"], alpha=0.12, linewidth=0)
    low, high = shown[0] * stride, shown[-1] * stride + length
    for row, summary in enumerate(shown):
        left, right = summary * stride, summary * stride + length
        inside = (max(left, start), max(min(right, end), max(left, start)))
        axis.add_patch(
            Rectangle(
                (left, row - 0.34),
                right - left,
                0.68,
                facecolor="#FBE9C6",
                edgecolor=PALETTE["compressed"],
            )
        )
        axis.add_patch(
            Rectangle(
                (inside[0], row - 0.34),
                inside[1] - inside[0],
                0.68,
                facecolor=PALETTE["compressed"],
            )
        )
        weight = weights[summary - first] if 0 <= summary - first < len(weights) else 0
        axis.text(
            high + 0.02 * (high - low),
            row,
            f"counts {_number(weight)}",
            va="center",
            fontsize=9,
            color=PALETTE["text"],
        )
    for edge in range(low - low % stride, high + 1, stride):
        axis.axvline(edge, color=PALETTE["faint"], linewidth=0.6, linestyle=":", zorder=3)
    axis.set_xlim(low, high + 0.14 * (high - low))
    axis.set_ylim(len(shown) - 0.4, -0.6)
    axis.set_yticks(range(len(shown)), [f"summary {j}" for j in shown])
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    ticks = sorted({start, end, *range(low - low % block_size, high + 1, block_size)})
    axis.set_xticks([t for t in ticks if low <= t <= high])
    axis.set_xlabel(f"token (block {block} shaded, dotted every {stride})", fontsize=9)
    told = ", ".join(_number(w) for w in weights)
    return Picture(
        figure,
        f"Block {block} counts {told} pieces of summaries {first} to {first + len(weights) - 1}",
    )


def _number(x: float) -> str:
    return f"{x:.2f}".rstrip("0").rstrip(".")


# -- one query --


def draw_best(query: int = 505, head: int = 12, n: int = 4) -> Picture:
    """Where one query's attention goes, block by block: the best blocks in colour, each with the
    text that it holds."""
    stored, mass = real()
    true, own = mass[head, query], query // BS
    best = true.topk(n).indices.tolist()
    figure, axes = new_figure(8.0, 2.9)
    axis = axes[0, 0]
    colours = [PALETTE["selected" if b in best else "line"] for b in range(own + 1)]
    axis.bar(range(own + 1), (100 * true[: own + 1]).tolist(), 0.7, color=colours)
    told = [(b, 100 * true[b].item(), stored.text[BS * b : BS * (b + 1)].decode()) for b in best]
    lines = [f"block {b}  {share:2.0f}%  {text!r}" for b, share, text in told]
    axis.text(
        0.04, 0.94, "\n".join(lines), transform=axis.transAxes, va="top", family="monospace",
        fontsize=9.5, linespacing=1.7, color=INKS["selected"],
    )  # fmt: skip
    axis.set_xlim(-0.7, own + 0.7)
    axis.set_xticks(range(0, own + 1, 4))
    axis.set_xlabel(f"block of {BS} tokens (a token is a byte of Python)", fontsize=9)
    axis.set_ylabel("share of the attention, %", fontsize=9)
    return Picture(
        figure,
        f"Token {query} sees {own + 1} blocks, and {n} of them hold {true[best].sum():.0%} of its "
        "attention",
    )


def draw_lists(arguments: tuple, got: Tensor, expected: Tensor) -> Picture:
    """The importance of each block to the first query whose list is wrong: the right list shaded,
    the other one marked.

    Args:
        arguments: of `select_blocks`, and the first query whose list is judged.
        got, expected: the lists from that query on, `[queries, H, top_n]`.
    """
    q, k_cmp, lse, _, block_size, length, stride, _, _, since = arguments
    row, head = (got != expected).any(-1).nonzero()[0].tolist()
    N, query = len(q), since + row
    own = query // block_size
    queries = query_rows(1, N, N, causal=True, cu_seqlens=None, device=q.device)
    rows = summary_rows(queries, N, length=length, stride=stride, cu_seqlens=None)
    overlap = block_selection.overlap_weights(length, stride, block_size, -(-N // block_size))
    worth = block_selection.importance(
        q[None], k_cmp[None], rows, lse[None], overlap=overlap, scale=q.shape[-1] ** -0.5
    )[0, query, head, : own + 1]
    yours, right = got[row, head].tolist(), expected[row, head].tolist()
    figure, axes = new_figure(8.0, 2.2)
    axis = axes[0, 0]
    for block in right:
        if block >= 0:
            axis.axvspan(block - 0.5, block + 0.5, color=PALETTE["selected"], alpha=0.22,
                         linewidth=0)  # fmt: skip
    axis.bar(range(own + 1), worth.tolist(), 0.62, color=PALETTE["compressed"])
    low = -0.08 * max(worth.max().item(), 1e-6)
    marked = [b for b in yours if b >= 0]
    axis.plot(marked, [low] * len(marked), "^", color=PALETTE["query"], clip_on=False)
    axis.set_xlim(-0.6, max(own, *marked, *right) + 0.6)
    axis.set_xlabel("block (expected list shaded, yours marked)", fontsize=9)
    axis.set_ylabel("importance", fontsize=9)
    of_head = f", KV head {head}" if k_cmp.shape[1] > 1 else ""
    return Picture(figure, f"Query {query}{of_head}: your list is {yours}, expected {right}")


def draw_query(
    query: int = 505,
    kv_head: int = 3,
    n: int = 4,
    *,
    num_initial: int = 0,
    num_local: int = 1,
    length: int = 8,
    stride: int = 4,
) -> Picture:
    """One query of one group: above what summaries guess of each block (its importance), below the
    attention it really gets; the list is shaded."""
    stored, mass = real()
    mine = slice(kv_head * stored.G, (kv_head + 1) * stored.G)
    sizes = {"length": length, "stride": stride}
    forced = {"num_initial": num_initial, "num_local": num_local}
    ids = lists("summaries", n, **forced, **sizes)[query, kv_head].tolist()
    best = lists("oracle", n)[query, kv_head].tolist()
    importance = scores("summaries", length, stride)[query, kv_head].numpy()
    true = mass[mine, query].mean(0).numpy()  # [NB]
    own = query // BS
    figure, axes = new_figure(8.0, 3.7, rows=2)
    figure.set_layout_engine(None)
    figure.subplots_adjust(left=0.1, right=0.985, top=0.85, bottom=0.13, hspace=0.25)
    rows = (
        (axes[0, 0], importance / (importance.sum() or 1), "compressed", "guess"),
        (axes[1, 0], true, "text", "true attention"),
    )
    for axis, values, colour, label in rows:
        for block in ids:
            if block >= 0:
                shade = PALETTE["own block" if block == own else "selected"]
                axis.axvspan(block - 0.5, block + 0.5, color=shade, alpha=0.22, linewidth=0)
        axis.bar(range(own + 1), 100 * values[: own + 1], 0.62, color=PALETTE[colour])
        axis.set_ylabel(f"{label}, %", fontsize=9)
        axis.set_xlim(-0.6, mass.shape[-1] - 0.4)
        axis.set_xticks(range(0, mass.shape[-1], 4))
    axes[0, 0].set_xticklabels([])
    axes[1, 0].set_xlabel(f"block of {BS} keys", fontsize=9)
    handles = [
        Patch(color=PALETTE["selected"], alpha=0.22, label="on the list"),
        Patch(color=PALETTE["own block"], alpha=0.22),
    ]
    handles[1].set_label("on the list: own block, forced")
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.09, 0.945),
        ncols=2,
        fontsize=8,
        frameon=False,
    )
    held = [sum(true[b] for b in row if b >= 0) for row in (ids, best)]
    return Picture(figure, f"Query {query}, KV head {kv_head}: the list holds {held[0]:.0%} of "
                           "the attention, "
                           f"the best {n} blocks {held[1]:.0%}")  # fmt: skip


# -- all heads, every n --


@functools.cache
def curve(by: str) -> Tensor:
    """The attention that lists of 1, 2, … 16 blocks hold, one per group: `[16, HQ]`."""
    return torch.stack(
        [captured(lists(by, n, num_local=int(by == "summaries"))) for n in range(1, 17)]
    )


def draw_mass(n: int = 4, kv_head: int = 3) -> Picture:
    """Blocks per list across, attention held upwards, by who made the list: left all heads, right
    the heads of one group."""
    G = real()[0].G
    figure, axes = new_figure(8.0, 3.5, columns=2)
    figure.set_layout_engine(None)
    figure.subplots_adjust(left=0.075, right=0.985, top=0.83, bottom=0.15, wspace=0.08)
    heads = {"all heads": slice(None), f"KV head {kv_head}": slice(kv_head * G, (kv_head + 1) * G)}
    at = {}
    for axis, (title, mine) in zip(axes[0], heads.items(), strict=True):
        for by in SOURCES:
            values = 100 * curve(by)[:, mine].mean(1)
            style, colour = "--" if by == "oracle" else "-", INKS[_COLOURS[by]]
            axis.plot(range(1, 17), values, style, color=colour, linewidth=2, label=_TITLES[by])
            axis.plot([n], [values[n - 1]], "o", color=colour, markersize=6)
            at[title, by] = f"{values[n - 1]:.0f}%"
        axis.axvline(n, color=PALETTE["faint"], linewidth=0.8, linestyle=":")
        axis.set_title(title, fontsize=10)
        axis.set_xticks([1, 4, 8, 12, 16])
        axis.set_ylim(0, 102)
        axis.set_xlabel("blocks on a list", fontsize=9)
    axes[0, 1].set_yticklabels([])
    axes[0, 0].set_ylabel("attention held, %", fontsize=9)
    axes[0, 1].legend(loc="lower right", fontsize=9, frameon=False)
    everyone, group = heads
    return Picture(figure, f"{n} blocks from summaries hold {at[everyone, 'summaries']} of the "
                           "attention, the best "
                           f"{at[everyone, 'oracle']}; in {group} {at[group, 'summaries']} and "
                           f"{at[group, 'oracle']}")  # fmt: skip


def draw_near_and_far(kv_head: int = 3, n: int = 4) -> Picture:
    """The attention that lists hold for one group's queries: those whose best block is among the
    latest `n`, and those whose best block is further back."""
    stored, mass = real()
    mine = slice(kv_head * stored.G, (kv_head + 1) * stored.G)
    t = torch.arange(SINCE, mass.shape[1])
    is_far = t // BS - mass[mine].mean(0).argmax(-1)[t] >= n
    figure, axes = new_figure(8.0, 2.7)
    axis, shares = axes[0, 0], {}
    kinds = {"near": t[~is_far], "far": t[is_far]}
    for column, (kind, queries) in enumerate(kinds.items()):
        for i, by in enumerate(SOURCES):
            ids = lists(by, n, num_local=int(by == "summaries"))
            share = 100 * (mass * listed(ids)).sum(-1)[mine, queries].mean().item()
            shares[kind, by], place = f"{share:.0f}%", column + 0.2 * (i - 1.5)
            label = _TITLES[by] if column == 0 else None
            axis.bar(place, share, 0.18, color=PALETTE[_COLOURS[by]], label=label)
            axis.text(place, share + 1.5, f"{share:.0f}", ha="center", fontsize=9,
                      color=PALETTE["text"])  # fmt: skip
    axis.set_xticks([0, 1], [f"{kind}: {len(queries)} queries" for kind, queries in kinds.items()])
    axis.tick_params(axis="x", length=0)
    axis.set_xlim(-0.5, 2.2)
    axis.set_ylim(0, 72)
    axis.set_ylabel("attention held, %", fontsize=9)
    axis.legend(loc="upper right", fontsize=9, frameon=False)
    return Picture(
        figure,
        f"KV head {kv_head}, far queries: {n} blocks from summaries hold "
        f"{shares['far', 'summaries']}, the latest {n} {shares['far', 'latest']}",
    )


# -- the choice, all queries of a group --


@functools.lru_cache(maxsize=256)
def _share(by: str, n: int, kv_head: int, **options: object) -> float:
    """The attention that lists hold, mean over the heads of a group; `options` are those of
    `lists`."""
    G = real()[0].G
    return captured(lists(by, n, **options))[kv_head * G : (kv_head + 1) * G].mean().item()


def draw_choice(
    kv_head: int = 3, n: int = 4, *, num_initial: int = 0, num_local: int = 1, length: int = 8,
    stride: int = 4,
    shared: bool = True,
) -> Picture:  # fmt: skip
    """Queries downwards, blocks across: importance from summaries, the lists that follow, and the
    attention the blocks really get.

    Where each head chooses for itself, the middle panel is the darker, the more heads list a block.
    """
    G, (_, N, NB) = real()[0].G, real()[1].shape
    options = {
        "num_initial": num_initial, "num_local": num_local,
        "length": length, "stride": stride, "shared": shared,
    }  # fmt: skip
    on_lists = listed(lists("summaries", n, **options))[kv_head * G : (kv_head + 1) * G]
    images = {
        "importance, from summaries": _importance_image(kv_head, length, stride),
        "lists": _lists_image(on_lists.double().mean(0).numpy()),
        "true attention": _true_image(kv_head),
    }
    sheet = Sheet(8.2, 3.95)
    for column, (title, image) in enumerate(images.items()):
        place = Place(0.68 + 2.5 * column, 0.58, 2.36, 2.62)
        sheet.image(place, image)
        sheet.text(place.x(0.5), 0.46, title, 10, ha="center")
        sheet.below(place, {(b + 0.5) / NB: b for b in range(0, NB, 8)}, f"block of {BS} keys")
        if column == 0:
            sheet.beside(place, {i / N: i for i in range(0, N + 1, 128)}, "query")
    names = {"selected": "listed", "own block": "listed: own block", "masked": "future"}
    sheet.legend(2.3, 3.78, names)
    found = _share("summaries", n, kv_head, **options)
    best = _share("oracle", n, kv_head, shared=shared)
    return Picture(
        sheet.figure,
        f"KV head {kv_head}, {n} blocks a query: the lists hold {found:.0%} of the attention, "
        f"the best lists {best:.0%}",
    )


@functools.lru_cache(maxsize=32)
def _importance_image(kv_head: int, length: int, stride: int) -> np.ndarray:
    importance = scores("summaries", length, stride)[:, kv_head]
    share = importance / importance.sum(-1, keepdim=True).clamp(min=1e-30)
    return _heat(share.numpy(), "compressed")


@functools.cache
def _true_image(kv_head: int) -> np.ndarray:
    stored, mass = real()
    return _heat(mass[kv_head * stored.G : (kv_head + 1) * stored.G].mean(0).numpy(), "text")


def _heat(share: np.ndarray, colour: str) -> np.ndarray:
    """Shares `[N, NB]` as colours; the full colour stands for a half and more, and small shares are
    lifted by a square root. 24 shades: no eye tells more, and the picture is half as large."""
    lifted = np.round(24 * np.sqrt(np.clip(share / 0.5, 0, 1))) / 24
    return _hide_future(bytes_of(lifted, shades(colour), 0, 1))


def _lists_image(share: np.ndarray) -> np.ndarray:
    """The share of heads `[N, NB]` that list a block as colours, the own blocks in theirs."""
    image = bytes_of(share, shades("selected"), 0, 1)
    own = np.arange(len(share))[:, None] // BS == np.arange(share.shape[1])
    image[own] = bytes_of(share[own], shades("own block"), 0, 1)
    return _hide_future(image)


def _hide_future(image: np.ndarray) -> np.ndarray:
    N, NB = image.shape[:2]
    image[np.arange(NB)[None, :] > np.arange(N)[:, None] // BS] = byte_colour("masked")
    return image


def sentence(kv_head: int, n: int, **options: object) -> str:
    """What there is to say about such lists; `options` are those of `draw_choice`."""
    stored = real()[0]
    options = {"num_initial": 0, "num_local": 1, "shared": True} | options
    shared, forced = options["shared"], options["num_initial"] + options["num_local"]
    held = _share("summaries", n, kv_head, **options)
    best, latest = _share("oracle", n, kv_head, shared=shared), _share("latest", n, kv_head)
    loaded = blocks_loaded(lists("summaries", n, **options))[kv_head]
    per = "one list for its" if shared else "a list for each of its"
    blocks = "1 block" if n == 1 else f"{n} blocks"
    return (
        f"KV head {kv_head} ({stored.labels[kv_head * stored.G][:7]}), {per} {stored.G} heads: "
        f"{blocks}, {forced} forced, hold {held:.0%} of the attention. "
        f"The best lists hold {best:.0%}, the latest blocks {latest:.0%}. "
        f"Together the {stored.G} heads load {loaded:.1f} blocks a query."
    )


# -- the jump --


def draw_jump() -> Picture:
    """The output of the turning query: selected attention jumps where its list changes, dense
    attention does not."""
    at = np.linspace(0, 1, 201)
    steps = [turn(float(s)) for s in at]
    flip = next(i for i in range(1, len(steps)) if steps[i].ids != steps[i - 1].ids)
    figure, axes = new_figure(8.0, 2.9)
    axis = axes[0, 0]
    for part in (slice(0, flip), slice(flip, None)):
        axis.plot(at[part], [x.o for x in steps[part]], color=PALETTE["selected"], linewidth=2)
        axis.text(at[part].mean(),
        np.mean([x.o for x in steps[part]]) + (0.18 if part.start == 0 else -0.16),
                  f"list {steps[part][0].ids}", color=PALETTE["selected"], fontsize=9,
                  ha="center")  # fmt: skip
    middle = (at[flip - 1] + at[flip]) / 2
    axis.plot(
        [middle] * 2, [steps[flip - 1].o, steps[flip].o], ":", color=PALETTE["query"], linewidth=1.5
    )
    axis.plot(at, [x.dense for x in steps], "--", color=PALETTE["text"], linewidth=1.2)
    handles = [
        Line2D(
            [],
            [],
            color=PALETTE["selected"],
            linewidth=2,
            label="selected attention, 2 of 4 blocks",
        )
    ]
    handles.append(
        Line2D(
            [], [], color=PALETTE["text"], linewidth=1.2, linestyle="--", label="dense attention"
        )
    )
    axis.legend(handles=handles, loc="lower right", fontsize=9, frameon=False)
    axis.set_xlabel("a, from a query for block 1 (0) to a query for block 2 (1)", fontsize=9)
    axis.set_ylabel("output", fontsize=9)
    return Picture(figure, f"At a = {middle:.2f} the list changes from {steps[flip - 1].ids} to "
                           f"{steps[flip].ids}: "
                           f"the output jumps from {steps[flip - 1].o:.2f} to "
                           f"{steps[flip].o:.2f}")  # fmt: skip


# -- the interactive --


def explore() -> Panel:
    """The interactive: slots, forced blocks, sharing and summaries, on one of the stored groups of
    heads."""

    def render(
        kv_head: int,
        sizes: tuple[int, int],
        top_n: int,
        num_initial: int,
        num_local: int,
        shared: bool,
    ) -> tuple[Picture, str]:
        options = {
            "num_initial": num_initial, "num_local": num_local,
            "length": sizes[0], "stride": sizes[1], "shared": shared,
        }  # fmt: skip
        return draw_choice(kv_head, top_n, **options), sentence(kv_head, top_n, **options)

    def limits(top_n: int, num_local: int, **_: object) -> dict[str, range]:
        """Forced blocks are within the list."""
        num_local = min(num_local, top_n)
        return {
            "num_local": range(min(_FORCED, top_n) + 1),
            "num_initial": range(min(_FORCED, top_n - num_local) + 1),
        }

    def idle(top_n: int, num_local: int, **_: object) -> set[str]:
        return {"num_initial"} if num_local == top_n else set()

    groups = real()[0].k.shape[2]
    sizes = {f"{length} tokens, every {stride}": (length, stride) for length, stride in SIZES}
    for (length, stride), shared in product(SIZES, (True, False)):
        scores("summaries", length, stride, shared)  # computed once, so that no control waits
    return panel(
        "chosen blocks",
        render,
        limits=limits,
        idle=idle,
        kv_head=ipywidgets.Dropdown(options=list(range(groups)), value=3, description="KV head"),
        sizes=ipywidgets.Dropdown(options=sizes, value=(8, 4), description="summaries of"),
        top_n=ipywidgets.IntSlider(4, 1, 16, description="blocks on a list"),
        num_initial=ipywidgets.IntSlider(0, 0, _FORCED, description="first blocks forced"),
        num_local=ipywidgets.IntSlider(1, 0, _FORCED, description="latest blocks forced"),
        shared=ipywidgets.Checkbox(True, description="one list for a group", indent=False),
    )
