"""Chapter 08's pictures: the three views of trained heads, their gated sum, what it misses and what
it costs.

`views` runs the three branches on the stored heads and keeps their outputs. `relative_error`,
`fit_gates` and `schemes` compute from them, `operations` and `new_token_bytes` count, the `draw_*`
functions draw, and `explore` puts sliders on gates, window and list. The text is 512 bytes long,
with blocks of 16 and summaries of 16 every 8; a long model has the paper's settings (arXiv
2502.11089, section 4.1). `phone_book` makes the finale's task, `train` trains the chapter's models
on it, and `is_right` tells which answers of theirs are right.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import ipywidgets
import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize, one_hot

from nsa_tutorial import ops
from nsa_tutorial.course import costs, heads
from nsa_tutorial.course.figures import PALETTE, Picture, new_figure, readable_on, shades
from nsa_tutorial.course.sheet import Place, Sheet
from nsa_tutorial.course.widgets import Panel, panel
from nsa_tutorial.exact.dense_attention import causal_mask
from nsa_tutorial.exact.grouped_query_attention import attention
from nsa_tutorial.sparse import query_tiles
from nsa_tutorial.sparse.selected_attention import QueryRows, query_rows

BRANCHES = ("compression", "selection", "window")
COLOURS = (PALETTE["compressed"], PALETTE["selected"], PALETTE["window"])
BLOCK_SIZE, LENGTH, STRIDE = 16, 16, 8
SUMMARIES = {"length": LENGTH, "stride": STRIDE}
TOP_N, WINDOW = (3, 4, 6, 8, 12, 16, 32), (8, 16, 32, 64, 128, 256, 512)
# section 4.1; the branches' settings there are the defaults of `costs`
MODEL = {"D": 192, "DV": 128, "HQ": 64, "H": 4}
LENGTHS = (4096, 8192, 16384, 32768, 65536)
FAR = 14  # layer 3 head 6
BINS = 16  # positions that are averaged in a curve


# -- what the branches give on the trained heads --


@dataclass(frozen=True)
class Views:
    """The three branches on the stored heads, each alone.

    Attributes:
        top_n, window: blocks in a list and keys in the window.
        ids: the lists `[1, N, H, top_n]`.
        outputs: `[3, 1, N, HQ, DV]`, of compression, selection and window.
        lse: `[3, 1, N, HQ]`.
        dense: what dense attention gives, `[1, N, HQ, DV]`.
    """

    top_n: int
    window: int
    ids: Tensor
    outputs: Tensor
    lse: Tensor
    dense: Tensor


@functools.cache
def _heads() -> heads.Heads:
    return heads.load()


@functools.cache
def _dense() -> Tensor:
    found = _heads()
    return attention(found.q, found.k, found.v)


@functools.cache
def _compression() -> tuple[Tensor, Tensor, Tensor]:
    found = _heads()
    k_cmp, v_cmp = (ops.compress(x, **SUMMARIES) for x in (found.k, found.v))
    return k_cmp, *ops.compressed_attention(found.q, k_cmp, v_cmp, **SUMMARIES, return_lse=True)


@functools.cache
def _selection(top_n: int) -> tuple[Tensor, Tensor, Tensor]:
    found, (k_cmp, _, lse) = _heads(), _compression()
    ids = ops.select_blocks(found.q, k_cmp, lse, top_n=top_n, block_size=BLOCK_SIZE, **SUMMARIES)
    # under a mask: ten times as fast on a CPU as gathering the lists' blocks, and 7 lists are run
    o, lse = query_tiles.selected_attention(
        found.q, found.k, found.v, ids[0], _rows(), block_size=BLOCK_SIZE,
        scale=found.q.shape[-1] ** -0.5,
    )  # fmt: skip
    return ids, o, lse


@functools.cache
def _rows() -> QueryRows:
    found = _heads()
    N = found.q.shape[1]
    return query_rows(1, N, N, causal=True, cu_seqlens=None, device=found.q.device)


@functools.cache
def _window(window: int) -> tuple[Tensor, Tensor]:
    found = _heads()
    return ops.sliding_window_attention(
        found.q, found.k, found.v, window_size=window, return_lse=True
    )


@functools.cache
def views(top_n: int = 4, window: int = 64) -> Views:
    """Run the three branches on the stored heads: mean summaries, lists chosen from them, and the
    window."""
    _, o_cmp, lse_cmp = _compression()
    ids, o_slc, lse_slc = _selection(top_n)
    o_swa, lse_swa = _window(window)
    return Views(
        top_n,
        window,
        ids,
        torch.stack([o_cmp, o_slc, o_swa]),
        torch.stack([lse_cmp, lse_slc, lse_swa]),
        _dense(),
    )


def relative_error(o: Tensor, dense: Tensor) -> Tensor:
    """Root of the squared difference over the squared output, per head: `[1, N, HQ, DV]` twice to
    `[HQ]`. 0 is exact, and an output of nothing but zeros has 1."""
    return ((o - dense).square().sum((0, 1, 3)) / dense.square().sum((0, 1, 3))).sqrt()


def error_by_position(o: Tensor, dense: Tensor) -> Tensor:
    """The same along the text, mean over heads: `[N // BINS]`, each position's difference relative
    to its head's usual output."""
    usual = dense.square().sum(3).mean(1, keepdim=True)  # [1, 1, HQ]
    squared = (o - dense).square().sum(3) / usual  # [1, N, HQ]
    return squared[0].unflatten(0, (-1, BINS)).mean(1).sqrt().mean(-1)


def gated(gates: Tensor, outputs: Tensor) -> Tensor:
    """Constant gates `[3]` or `[3, HQ]`, the same for every token, on
    `outputs [3, 1, N, HQ, DV]`."""
    gates = gates.reshape(3, 1, 1, -1, 1).to(outputs.dtype)
    return (gates * outputs).sum(0)


def fit_gates(outputs: Tensor, dense: Tensor, *, bounded: bool = True) -> Tensor:
    """The constant gates of each head, `[3, HQ]`, whose sum comes nearest to dense attention, by
    least squares.

    Args:
        outputs: `[3, 1, N, HQ, DV]`.
        dense: `[1, N, HQ, DV]`.
        bounded: keep them between 0 and 1, as a sigmoid's are.
    """
    A = outputs[:, 0].permute(2, 1, 3, 0).flatten(1, 2).double()  # [HQ, N * DV, 3]
    y = dense[0].transpose(0, 1).flatten(1).double()  # [HQ, N * DV]
    gram, mixed = A.mT @ A, (A.mT @ y[..., None])[..., 0]  # [HQ, 3, 3], [HQ, 3]
    if not bounded:
        return _solve(gram, mixed).T
    best = torch.full((len(A),), torch.inf, dtype=torch.float64)
    gates = torch.zeros(len(A), 3, dtype=torch.float64)
    for state in product((0.0, 1.0, None), repeat=3):  # each gate at a bound, or free
        free = [i for i in range(3) if state[i] is None]
        # [HQ, 3]
        tried = torch.tensor([x or 0.0 for x in state], dtype=torch.float64).repeat(len(A), 1)
        if free:
            rest = mixed - (gram @ tried[..., None])[..., 0]
            tried[:, free] = _solve(gram[:, free][:, :, free], rest[:, free])
        loss = (tried[:, None] @ gram @ tried[..., None])[:, 0, 0] - 2 * (tried * mixed).sum(1)
        better = (tried >= 0).all(1) & (tried <= 1).all(1) & (loss < best)
        best, gates = torch.where(better, loss, best), torch.where(better[:, None], tried, gates)
    return gates.T


def _solve(gram: Tensor, mixed: Tensor) -> Tensor:
    """The least of the solutions: two branches that see everything are one and the same."""
    return (torch.linalg.pinv(gram, rtol=1e-10, hermitian=True) @ mixed[..., None])[..., 0]


def best_equal_gate(outputs: Tensor, dense: Tensor) -> float:
    """The one constant gate, from 0 to 1 in steps of 0.01, with the smallest mean error over the
    heads.

    All three branches, all heads and all tokens have this gate.
    """
    total = outputs.sum(0)
    return min(
        (g / 100 for g in range(101)), key=lambda g: relative_error(g * total, dense).mean().item()
    )


def nearest_per_token(outputs: Tensor, dense: Tensor) -> Tensor:
    """The gated sum `[1, N, HQ, DV]` with the best three numbers for each token and head: no gates
    whatever come nearer."""
    A = outputs[:, 0].permute(1, 2, 3, 0).double()  # [N, HQ, DV, 3]
    nearest = A @ (torch.linalg.pinv(A, rtol=1e-6) @ dense[0, ..., None].double())
    return nearest[None, ..., 0].to(dense.dtype)


def lse_weights(lse: Tensor, tokens: int = 1) -> Tensor:
    """The branches merged as if their keys were disjoint: softmax over the branches'
    `lse [3, ...]`.

    Args:
        lse: of compression, selection and window.
        tokens: how many tokens a summary counts for.
    """
    more = torch.tensor([np.log(tokens), 0.0, 0.0], dtype=lse.dtype).view(3, *(1,) * (lse.ndim - 1))
    return torch.softmax(lse + more, 0)


def schemes(top_n: int = 4, window: int = 64) -> dict[str, float]:
    """The relative error, mean over heads, of each branch alone and of several ways to put them
    together."""
    v = views(top_n, window)

    def error(o: Tensor) -> float:
        return relative_error(o, v.dense).mean().item()

    found = {f"{name} alone": error(o) for name, o in zip(BRANCHES, v.outputs, strict=True)}
    for name, gate in (("gates 1, 1, 1", 1.0), ("gates ½, ½, ½", 1 / 2), ("gates ⅓, ⅓, ⅓", 1 / 3)):
        found[name] = error(gated(torch.full((3,), gate), v.outputs))
    found["best equal gates"] = error(best_equal_gate(v.outputs, v.dense) * v.outputs.sum(0))
    found["merged by LSE"] = error((lse_weights(v.lse)[..., None] * v.outputs).sum(0))
    found[f"by LSE, a summary counts {STRIDE}"] = error(
        (lse_weights(v.lse, STRIDE)[..., None] * v.outputs).sum(0)
    )
    found["best constant gates"] = error(gated(fit_gates(v.outputs, v.dense), v.outputs))
    found["best gates per token"] = error(nearest_per_token(v.outputs, v.dense))
    return found


def entries(top_n: int = 4, window: int = 64, N: int = 512) -> dict[str, float]:
    """Keys and values that a query of the text loads, mean over its `N` queries, by branch."""
    keys = (
        costs.summary_keys(N, N, **SUMMARIES),
        costs.selected_keys(N, N, block_size=BLOCK_SIZE, top_n=top_n),
        costs.window_keys(N, N, window_size=window),
    )
    return dict(zip(BRANCHES, (count / N for count in keys), strict=True))


def dense_entries(N: int = 512) -> float:
    """Keys that a query sees in dense attention, mean over `N` queries."""
    return costs.visible_pairs(N, N) / N


# -- where the weights are --


@functools.cache
def weights_by_branch(head: int, top_n: int = 4, window: int = 64) -> np.ndarray:
    """Attention weights of one head on tokens, `[4, N, N]`: of the three branches, and dense. A
    summary's weight is spread evenly over its tokens: with mean values, that is what its tokens'
    values get."""
    found, v = _heads(), views(top_n, window)
    N, kv_head = found.q.shape[1], head // found.G
    q, k = found.q[0, :, head].double(), found.k[0, :, kv_head].double()
    scores = q @ k.T * k.shape[1] ** -0.5
    causal, key = causal_mask(N, N), torch.arange(N)
    # one column more for the empty slots
    lists = torch.zeros(N, N // BLOCK_SIZE + 1, dtype=torch.bool)
    lists.scatter_(1, v.ids[0, :, kv_head].long() % lists.shape[1], True)
    masks = [
        lists[:, :-1].repeat_interleave(BLOCK_SIZE, 1) & causal,
        causal & (key[None] > key[:, None] - window),
        causal,
    ]
    found_weights = [torch.softmax(scores.masked_fill(~mask, -torch.inf), 1) for mask in masks]

    start = torch.arange(0, N - LENGTH + 1, STRIDE)  # [M_c]
    spread = (
        (key >= start[:, None]) & (key < start[:, None] + LENGTH)
    ).double() / LENGTH  # [M_c, N]
    summary_scores = (scores @ spread.T).masked_fill(start + LENGTH - 1 > key[:, None], -torch.inf)
    compressed = torch.softmax(summary_scores, 1).nan_to_num(0) @ spread
    return torch.stack([compressed, *found_weights]).numpy()


def _image(weights: np.ndarray) -> np.ndarray:
    """Weights `[N, N]` for the eye: the largest of each 4 × 4, its cube root, so that a summary's
    thin weights show beside a token's."""
    N = len(weights)
    return np.cbrt(weights.reshape(N // 4, 4, N // 4, 4).max((1, 3)))


def draw_views(
    head: int = FAR,
    gates: tuple[float, float, float] | None = None,
    top_n: int = 4,
    window: int = 64,
) -> Picture:
    """The weights of one head as each branch sees them, their gated sum, and dense attention; the
    best constant gates if None."""
    v, weights = views(top_n, window), weights_by_branch(head, top_n, window)
    best = fit_gates(v.outputs, v.dense)[:, head]
    gate = best if gates is None else torch.tensor(gates, dtype=torch.float64)
    total = np.tensordot(gate.numpy(), weights[:3], 1)
    o = gated(gate, v.outputs)
    alone = [relative_error(x, v.dense)[head].item() for x in v.outputs]
    error = relative_error(o, v.dense)[head].item()

    figure, axes = new_figure(9.5, 2.9, columns=5)
    figure.set_layout_engine(None)
    figure.subplots_adjust(left=0.06, right=0.995, top=0.76, bottom=0.16, wspace=0.09)
    names = [f"{name}\nerror {100 * e:.0f}%" for name, e in zip(BRANCHES, alone, strict=True)]
    names += [
        "{:.2f} · {:.2f} · {:.2f}".format(*gate.tolist()) + f"\ngated, error {100 * error:.0f}%",
        "dense\n",
    ]
    for axis, name, image, colour in zip(
        axes[0],
        names,
        (*weights[:3], total, weights[3]),
        (*COLOURS, PALETTE["text"], PALETTE["text"]),
        strict=True,
    ):
        axis.imshow(
            _image(image),
            cmap=shades(colour),
            vmin=0,
            vmax=0.75,
            extent=(0, 512, 512, 0),
            interpolation="none",
        )
        axis.set_title(name, fontsize=9, color=PALETTE["text"])
        axis.set_xticks([0, 128, 256, 384])
        axis.set_yticks([0, 128, 256, 384] if axis is axes[0, 0] else [])
        axis.set_xlabel("key", fontsize=9, labelpad=1)
    axes[0, 0].set_ylabel("query", fontsize=9, labelpad=1)
    label = _heads().labels[head].capitalize()
    nearest = min(alone)
    told = (
        f"{label}: the nearest single view is off by {100 * nearest:.0f}%, the gated sum by "
        f"{100 * error:.0f}%"
    )
    return Picture(figure, told)


# -- how near the sum comes --


def draw_schemes(top_n: int = 4, window: int = 64) -> Picture:
    """The errors of `schemes`, a bar each."""
    found = schemes(top_n, window)
    figure, axes = new_figure(8.0, 3.6)
    axis = axes[0, 0]
    colours = [*COLOURS, *[PALETTE["masked"]] * 4, *[PALETTE["faint"]] * 2, *[PALETTE["text"]] * 2]
    axis.barh(range(len(found)), [100 * x for x in found.values()], 0.7, color=colours)
    for place, error in enumerate(found.values()):
        axis.text(
            100 * error + 1,
            place,
            f"{100 * error:.0f}%",
            va="center",
            fontsize=9,
            color=PALETTE["text"],
        )
    axis.set_yticks(range(len(found)), list(found))
    axis.invert_yaxis()
    axis.set_xlabel(
        "relative error against dense attention, mean over 16 heads, percent", fontsize=9
    )
    single = min(list(found.values())[:3])
    best = found["best constant gates"]
    per_token = found["best gates per token"]
    told = f"The best branch alone is {100 * single:.0f}% off, constant gates {100 * best:.0f}%, "
    return Picture(figure, told + f"gates for each token {100 * per_token:.0f}% at best")


# -- what it costs --


def operations(N: int) -> dict[str, int]:
    """Operations of one layer of the paper's model on `N` tokens, by part: three branches, and the
    choice of blocks, which is all else that `costs.native_sparse_attention` counts."""
    branches = {
        "compression": costs.compressed_attention(N, N, **MODEL).flops,
        "selection": costs.selected_attention(N, N, **MODEL).flops,
        "window": costs.sliding_window_attention(N, N, **MODEL).flops,
    }
    return {
        "choice": costs.native_sparse_attention(N, N, **MODEL).flops - sum(branches.values()),
        **branches,
    }


def new_token_bytes(M: int) -> dict[str, int]:
    """Bytes that each branch moves for one new token at the end of `M`, in one layer of the paper's
    model. The choice reads what the compressed branch has just read, and is left out."""
    return {
        "compression": costs.compressed_attention(1, M, **MODEL).bytes,
        "selection": costs.selected_attention(1, M, **MODEL).bytes,
        "window": costs.sliding_window_attention(1, M, **MODEL).bytes,
    }


def draw_costs() -> Picture:
    """Operations a token of NSA's parts beside dense attention, their shares, and the bytes that
    one new token moves."""
    figure, axes = new_figure(10.4, 3.4, columns=3)
    left, middle, right = axes[0]
    per_token = [{name: flops / N / 1e6 for name, flops in operations(N).items()} for N in LENGTHS]
    dense = [costs.tiled_attention(N, N, **MODEL).flops / N / 1e6 for N in LENGTHS]
    _draw_stacks(left, per_token, dense, "operations a token, million")
    moved = [{name: size / 2**20 for name, size in new_token_bytes(N).items()} for N in LENGTHS]
    _draw_stacks(
        right,
        moved,
        [costs.decode_attention(N, **MODEL).bytes / 2**20 for N in LENGTHS],
        "moved for one new token, MiB",
    )
    shares = [{name: 100 * x / sum(one.values()) for name, x in one.items()} for one in per_token]
    _stack(middle, shares, 0.7, 0.0)
    middle.set_ylabel("share of NSA's operations, percent", fontsize=9)
    left.legend(fontsize=8.5, frameon=False, loc="upper left")
    longest = per_token[-1]
    share = (longest["compression"] + longest["choice"]) / sum(longest.values())
    return Picture(
        figure,
        f"At {LENGTHS[-1]:,} tokens, {100 * share:.0f}% of NSA's operations are about summaries",
    )


def _draw_stacks(
    axis: Axes, stacks: list[dict[str, float]], dense: list[float], label: str
) -> None:
    """Dense attention's bars, and beside each NSA's, with how many times less that is."""
    axis.bar(np.arange(len(dense)) - 0.2, dense, 0.4, color=PALETTE["faint"], label="dense")
    tops = _stack(axis, stacks, 0.4, 0.2)
    for i, (whole, ours) in enumerate(zip(dense, tops, strict=True)):
        look = {"ha": "center", "fontsize": 8, "color": PALETTE["text"]}
        axis.text(i + 0.26, ours + 0.015 * dense[-1], f"1/{whole / ours:.1f}", **look)
    axis.set_ylabel(label, fontsize=9)


def _stack(axis: Axes, stacks: list[dict[str, float]], width: float, shift: float) -> np.ndarray:
    """NSA's parts on top of each other, a bar for each of `LENGTHS`; returns their heights."""
    colours = {"choice": "#F6D48A", **dict(zip(BRANCHES, COLOURS, strict=True))}
    place, base = np.arange(len(stacks)), np.zeros(len(stacks))
    for name in stacks[0]:
        size = np.array([stack[name] for stack in stacks])
        label = "choice of blocks" if name == "choice" else name
        axis.bar(place + shift, size, width, base, color=colours[name], label=label)
        base = base + size
    axis.set_xticks(place, [f"{N // 1024}k" for N in LENGTHS])
    axis.set_xlabel("tokens (k = 1,024)", fontsize=9)
    return base


# -- the finale: a long look back --

ENTRIES, NAME_WIDTH, NUMBERS = 256, 64, 16  # of a phone book; the numbers are 0 to 15
BUDGET = 96  # keys that a query of either sparse model loads, at most
BATCH, STEPS, RATE = 4, 150, 0.03  # of the training


class Book(NamedTuple):
    """Phone books: each entry has a name and a number, and asks for an earlier name's number.

    Attributes:
        x: `[B, ENTRIES, 2 * NAME_WIDTH + NUMBERS]`: the name, the number (1 at its place, 0
            elsewhere), and the name that is asked for.
        answer: `[B, ENTRIES]`, the number of that name.
        back: `[B, ENTRIES]`, how many entries back it stands; 0 is the entry itself.
    """

    x: Tensor
    answer: Tensor
    back: Tensor


def phone_book(batch: int, generator: torch.Generator) -> Book:
    """New books of random names, which have length 1, and random numbers. Each entry asks for one
    of the entries so far, all equally likely."""
    shape, place = (batch, ENTRIES), torch.arange(ENTRIES)
    names = normalize(torch.randn(*shape, NAME_WIDTH, generator=generator), dim=-1)
    numbers = torch.randint(NUMBERS, shape, generator=generator)
    asked = (torch.rand(shape, generator=generator) * (place + 1)).long()
    wanted = names.gather(1, asked[..., None].expand_as(names))
    x = torch.cat([names, one_hot(numbers, NUMBERS).float(), wanted], -1)
    return Book(x, numbers.gather(1, asked), place - asked)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Tensors are so small here that several threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@_one_thread()
def train(model: torch.nn.Module, steps: int = STEPS) -> torch.nn.Module:
    """Train a model, `[B, N, width]` to a score for each number, on new books by Adam."""
    generator = torch.Generator().manual_seed(1)
    adam = torch.optim.Adam(model.parameters(), lr=RATE)
    for _ in range(steps):
        book = phone_book(BATCH, generator)
        loss = cross_entropy(model(book.x).flatten(0, 1), book.answer.flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()
    return model


@_one_thread()
@torch.no_grad()
def is_right(model: torch.nn.Module, **options: object) -> tuple[Tensor, Tensor]:
    """Whether a model's answers on 32 new books are right, and how far back they stand: both
    `[32, ENTRIES]`."""
    book = phone_book(32, torch.Generator().manual_seed(2))
    return model(book.x, **options).argmax(-1) == book.answer, book.back


def share_right(model: torch.nn.Module, low: int, high: int = ENTRIES, **options: object) -> float:
    """The share of right answers, in percent, among those that stand `low` to `high - 1` entries
    back."""
    right, back = is_right(model, **options)
    return 100 * right[(back >= low) & (back < high)].float().mean().item()


def draw_recall(models: dict[str, torch.nn.Module]) -> Picture:
    """How many answers are right, over how far back they stand; a line for each of "dense",
    "window" and "NSA"."""
    figure, axes = new_figure(8.0, 3.3)
    axis = axes[0, 0]
    looks = {"dense": ("faint", "--"), "window": ("window", "^-"), "NSA": ("selected", "o-")}
    for name, model in models.items():
        right, back = is_right(model)
        shares = [100 * right[back // BINS == i].float().mean() for i in range(ENTRIES // BINS)]
        middle, (colour, look) = BINS * (np.arange(len(shares)) + 0.5), looks[name]
        axis.plot(middle, shares, look, color=PALETTE[colour], markersize=4, label=name)
    axis.axvline(BUDGET, color=PALETTE["text"], linewidth=0.8)
    axis.text(BUDGET + 2, 58, f"the window of {BUDGET}\nends here", fontsize=9)
    axis.axhline(100 / NUMBERS, color=PALETTE["faint"], linestyle=":", linewidth=1)
    axis.text(2, 100 / NUMBERS + 2, f"a blind guess: 1 in {NUMBERS}", fontsize=9)
    axis.set(xlim=(0, ENTRIES), ylim=(0, 105))
    axis.set_xlabel("how many entries back the answer stands", fontsize=9)
    axis.set_ylabel("right answers, percent", fontsize=9)
    axis.legend(loc="center right", fontsize=9, frameon=False, ncols=len(models))
    told = ", ".join(f"{name} {share_right(m, BUDGET):.0f}%" for name, m in models.items())
    return Picture(figure, f"Right answers from {BUDGET} entries back or more: {told}")


# -- the interactive --


@functools.lru_cache(maxsize=64)
def _curves(top_n: int, window: int) -> tuple[np.ndarray, float]:
    """The branches' errors along the text, `[3, N // BINS]`, and the error under the best constant
    gates."""
    v = views(top_n, window)
    along = torch.stack([error_by_position(output, v.dense) for output in v.outputs])
    best = relative_error(gated(fit_gates(v.outputs, v.dense), v.outputs), v.dense)
    return along.numpy(), best.mean().item()


def _sum_of(
    g_cmp: float, g_slc: float, g_swa: float, window: int, top_n: int
) -> tuple[Tensor, float]:
    """The gated sum's error along the text, and its mean over the heads."""
    v = views(top_n, window)
    o = gated(torch.tensor([g_cmp, g_slc, g_swa]), v.outputs)
    return error_by_position(o, v.dense), relative_error(o, v.dense).mean().item()


def sentence(g_cmp: float, g_slc: float, g_swa: float, window: int, top_n: int) -> str:
    """What there is to say about a choice of gates, window and list."""
    loaded, (_, best) = entries(top_n, window), _curves(top_n, window)
    error = _sum_of(g_cmp, g_slc, g_swa, window, top_n)[1]
    read, all_keys = sum(loaded.values()), dense_entries()
    told = (
        f"Gates {g_cmp:.1f}, {g_slc:.1f}, {g_swa:.1f}: error {100 * error:.0f}% (best "
        f"constant gates: {100 * best:.0f}%). "
    )
    told += f"A query loads {read:.0f} keys, summaries included, "
    return f"{told}{100 * read / all_keys:.0f}% of dense attention's {all_keys:.0f}."


def draw_gates(
    g_cmp: float, g_slc: float, g_swa: float, window: int = 64, top_n: int = 4
) -> Picture:
    """Left the error along the text, of each branch and of the gated sum; right what the branches
    load."""
    along, error = _sum_of(g_cmp, g_slc, g_swa, window, top_n)
    loaded = entries(top_n, window)
    sheet = Sheet(8.4, 3.7)
    curves = [*_curves(top_n, window)[0], along.numpy()]
    _draw_errors(sheet, Place(0.75, 0.62, 4.75, 2.5), curves)
    _draw_entries(sheet, Place(6.35, 0.42, 1.95, 2.7), loaded)
    share = sum(loaded.values()) / dense_entries()
    told = (
        f"Gates {g_cmp:.1f}, {g_slc:.1f}, {g_swa:.1f}: error {100 * error:.0f}%, "
        f"{100 * share:.0f}% of dense attention's loads"
    )
    return Picture(sheet.figure, told)


def _draw_errors(sheet: Sheet, place: Place, curves: list[np.ndarray]) -> None:
    """One line per branch and one, thicker, for their gated sum."""
    top = 160 if np.max(curves) < 1.6 else 200  # percent; more than 200 no gates reach
    x = place.x((np.arange(len(curves[0])) + 0.5) / len(curves[0]))
    paths = [np.stack([x, place.y(1 - 100 * errors / top)], 1) for errors in curves]
    percent, names = range(0, top + 1, 50), (*BRANCHES, "gated sum")
    rules = [[(place.left, y), (place.x(1), y)] for y in (place.y(1 - p / top) for p in percent)]
    sheet.lines(rules, "masked", [1.0, *[0.5] * (len(rules) - 1)])
    colours, widths = [*COLOURS, "text"], [1.4, 1.4, 1.4, 2.6]
    keys = [place.left + start for start in (0.1, 1.4, 2.45, 3.4)]
    dashes = [[(left, 0.46), (left + 0.22, 0.46)] for left in keys]
    sheet.lines([*paths, *dashes], colours * 2, widths * 2)
    for left, name in zip(keys, names, strict=True):
        sheet.text(left + 0.28, 0.46, name)
    tokens = _heads().q.shape[1]
    sheet.below(place, {t / tokens: t for t in range(0, tokens + 1, 128)}, "position of the query")
    sheet.beside(place, {1 - p / top: p for p in percent}, "relative error, percent")


def _draw_entries(sheet: Sheet, place: Place, loaded: dict[str, float]) -> None:
    """Two bars: the keys that a query of dense attention loads, and those of the three branches."""
    total, dense = sum(loaded.values()), dense_entries()
    top, width = max(300.0, 1.12 * total), 0.8
    left = {"dense": place.left + 0.1, "NSA": place.left + 1.05}
    bars = [(left["dense"], place.y(1 - dense / top), width, place.height * dense / top)]
    base = 0.0
    for colour, (name, count) in zip(COLOURS, loaded.items(), strict=True):
        base += count
        bars.append((left["NSA"], place.y(1 - base / top), width, place.height * count / top))
        if count * place.height / top > 0.3:
            y = place.y(1 - (base - count / 2) / top)
            words = f"{name}\n{count:.0f}"
            x = left["NSA"] + width / 2
            sheet.text(x, y, words, 8, readable_on(colour), ha="center", spacing=1.0)
    sheet.boxes(bars, ["faint", *COLOURS])
    for name, height in (("dense", dense), ("NSA", total)):
        x = left[name] + width / 2
        sheet.text(x, place.y(1 - height / top) - 0.04, f"{height:.0f}", ha="center", va="bottom")
        sheet.text(x, place.y(1) + 0.04, name, ha="center", va="top")
    sheet.lines([[(place.left, place.y(1)), (place.x(1), place.y(1))]], "faint")
    sheet.beside(place, {}, "keys a query loads, mean")


def explore() -> Panel:
    """The interactive: three gates, the window and the list; error against dense attention, and
    what is loaded."""

    def render(
        g_cmp: float, g_slc: float, g_swa: float, window: int, top_n: int
    ) -> tuple[Picture, str]:
        settings = (g_cmp, g_slc, g_swa, window, top_n)
        return draw_gates(*settings), sentence(*settings)

    def gate(name: str) -> ipywidgets.FloatSlider:
        return ipywidgets.FloatSlider(
            0.5, min=0.0, max=1.0, step=0.1, description=f"gate of {name}", readout_format=".1f"
        )

    for top_n in TOP_N:  # computed once, so that no slider waits
        _selection(top_n)
    for window in WINDOW:
        _window(window)
    return panel(
        "gates, window and list",
        render,
        g_cmp=gate("compression"),
        g_slc=gate("selection"),
        g_swa=gate("window"),
        window=ipywidgets.SelectionSlider(
            options=WINDOW, value=64, description="keys in the window"
        ),
        top_n=ipywidgets.SelectionSlider(options=TOP_N, value=4, description="blocks in the list"),
    )
