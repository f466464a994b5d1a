"""Chapter 08's pictures: the three views of trained heads, their gated sum, what it misses and what
it costs.

`views` runs the three branches on the stored heads and keeps their outputs. `relative_error`,
`fit_gates` and `schemes` compute from them, `operations` and `new_token_bytes` count, the `draw_*`
functions draw, and `explore` puts sliders on gates, window and list. The text is 512 bytes long,
with blocks of 16 and summaries of 16 every 8; a long model has the paper's settings (arXiv
2502.11089, section 4.1). `stored` reads what `course.train_choice` found out about phone books, and
`mutants` are broken implementations for tests to find.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import ipywidgets
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.course import costs, heads, train_choice
from nsa_tutorial.course.diffs import Edited
from nsa_tutorial.course.exercises import native_sparse_attention as solutions
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
MIXED = 13  # layer 3 head 5, whose error the sum cuts by the largest share
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


def with_noise(outputs: Tensor) -> Tensor:
    """The outputs `[3, 1, N, HQ, DV]` with random numbers in place of compression's, as large in
    each head."""
    noise = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(0))
    size = (0, 1, 3)
    noise = noise * (outputs[0].square().sum(size) / noise.square().sum(size)).sqrt()[:, None]
    return torch.stack([noise, *outputs[1:]])


def with_shuffled(outputs: Tensor) -> Tensor:
    """The outputs with compression's handed to other tokens."""
    tokens = torch.randperm(outputs.shape[2], generator=torch.Generator().manual_seed(0))
    return torch.stack([outputs[0][:, tokens], *outputs[1:]])


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
    return found


def fits(top_n: int = 4, window: int = 64) -> dict[str, tuple[float, float]]:
    """The errors of the best constant gates of each head, and of the best three numbers for each
    token and head, mean over heads; with compression's output, and with others in its place."""
    v = views(top_n, window)
    given = {
        "its own output": v.outputs,
        "other tokens' outputs": with_shuffled(v.outputs),
        "noise": with_noise(v.outputs),
    }
    found = {}
    for name, outputs in given.items():
        fitted = gated(fit_gates(outputs, v.dense), outputs), nearest_per_token(outputs, v.dense)
        constant, free = (relative_error(o, v.dense).mean().item() for o in fitted)
        found[name] = constant, free
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
    head: int = MIXED,
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
    """Left the errors of `schemes`, a bar each; right those of `fits`, two bars each."""
    found, fitted = schemes(top_n, window), fits(top_n, window)
    figure, axes = new_figure(10.4, 3.3, columns=2, width_ratios=(3, 2))
    left, right = axes[0]
    colours = [*COLOURS, *[PALETTE["masked"]] * 4, *[PALETTE["faint"]] * 2]
    _bars(left, list(found), list(found.values()), colours)
    left.set_xlabel("error against dense attention, percent, mean of 16 heads", fontsize=9)
    names = [f"{kind}, {name}" for name in fitted for kind in ("constant", "per token")]
    values = [error for pair in fitted.values() for error in pair]
    looks = [PALETTE["text"], PALETTE["line"]] * len(fitted)
    _bars(right, names, values, looks)
    right.set_xlabel("error of the best gates, percent", fontsize=9)
    right.set_title("compression gives …", loc="left", fontsize=9, color=PALETTE["text"])
    right.set(xlim=(0, 30))
    single = min(list(found.values())[:3])
    own, noise = fitted["its own output"], fitted["noise"]
    told = (
        f"Constant gates are {100 * own[0]:.0f}% off, the window alone {100 * single:.0f}%; gates "
        f"per token fit noise almost as well ({100 * own[1]:.0f}% and {100 * noise[1]:.0f}%)"
    )
    return Picture(figure, told)


def _bars(axis: Axes, names: list[str], values: list[float], colours: list[str]) -> None:
    """Errors as bars, each with its number."""
    axis.barh(range(len(names)), [100 * x for x in values], 0.7, color=colours)
    for place, error in enumerate(values):
        axis.text(100 * error, place, f" {100 * error:.0f}%", va="center", fontsize=9,
                  color=PALETTE["text"])  # fmt: skip
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()


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


# -- where the choice learns --


@functools.cache
def choice_learns() -> dict:
    """What `course.train_choice` stored."""
    return json.loads(train_choice.PATH.read_text(encoding="utf-8"))


def stored(variant: str, steps: int, span: str = "far", what: str = "right") -> list[float]:
    """Percentages of a variant of `train_choice` after so many steps, one of each seed: of right
    answers, or of answers whose block is on the list."""
    runs = choice_learns()["runs"]
    return [r[what][span] for r in runs if (r["variant"], r["steps"]) == (variant, steps)]


def stored_mean(variant: str, steps: int, span: str = "far", what: str = "right") -> float:
    """Their mean over the seeds."""
    return float(np.mean(stored(variant, steps, span, what)))


def closed_mean(branch: str, steps: int, span: str = "far") -> float:
    """Percent of right answers of NSA, mean over the seeds, where one gate is closed after the
    training."""
    runs = choice_learns()["runs"]
    found = [r for r in runs if (r["variant"], r["steps"]) == ("NSA", steps)]
    return float(np.mean([r["gate_closed"][branch][span] for r in found]))


def draw_choice() -> Picture:
    """The far answers that each variant gets right: means of the seeds, and the lowest and highest
    seed."""
    rows = [
        ("dense: every entry", "dense", 150, "faint"),
        ("NSA, 450 steps", "NSA", 450, "selected"),
        ("NSA, 150 steps", "NSA", 150, "selected"),
        ("lists drawn at random, 450 steps", "random lists", 450, "masked"),
        ("lists drawn at random, 150 steps", "random lists", 150, "masked"),
        ("compression's gate 0, 450 steps", "compression muted", 450, "compressed"),
        ("compression's gate 0, 150 steps", "compression muted", 150, "compressed"),
        (f"a window of {train_choice.BUDGET}", "window", 150, "window"),
    ]
    figure, axes = new_figure(8.0, 3.4)
    axis = axes[0, 0]
    for place, (_, variant, steps, colour) in enumerate(rows):
        found = stored(variant, steps)
        mean = np.mean(found)
        spread = [[mean - min(found)], [max(found) - mean]]
        look = {"color": PALETTE[colour], "ecolor": PALETTE["text"], "capsize": 3}
        axis.barh(place, mean, 0.66, xerr=spread, **look)
        axis.text(max(found) + 1.5, place, f"{mean:.0f}%", va="center", fontsize=9,
                  color=PALETTE["text"])  # fmt: skip
    axis.axvline(100 / train_choice.NUMBERS, color=PALETTE["text"], linestyle=":", linewidth=1)
    axis.text(100 / train_choice.NUMBERS + 1, -0.62, "a blind guess", fontsize=8.5)
    axis.set_yticks(range(len(rows)), [row[0] for row in rows])
    axis.invert_yaxis()
    axis.set(xlim=(0, 108))
    seeds = choice_learns()["seeds"]
    axis.set_xlabel(
        f"right answers {train_choice.BUDGET} entries back or more, percent: mean and range of "
        f"{seeds} seeds", fontsize=9,
    )  # fmt: skip
    found = {name: stored_mean(name, 450) for name in ("NSA", "compression muted", "random lists")}
    told = (
        f"After 450 steps NSA finds {found['NSA']:.0f}%; with compression's gate at 0, "
        f"{found['compression muted']:.0f}%, less than random lists ({found['random lists']:.0f}%)"
    )
    return Picture(figure, told)


def draw_recall(live: dict[str, Tensor] | None = None) -> Picture:
    """Right answers over how far back they stand: bands of all seeds, and a model of the reader's.

    Args:
        live: what `train_choice.answers` gives of it; None draws what is stored alone.
    """
    figure, axes = new_figure(8.0, 3.3)
    axis = axes[0, 0]
    bins, edges = train_choice.BINS, train_choice.ENTRIES // train_choice.BINS
    middle = bins * (np.arange(edges) + 0.5)
    looks = {
        ("dense", 150): ("faint", "--"), ("window", 150): ("window", "^-"),
        ("NSA", 450): ("selected", "o-"), ("NSA", 150): ("selected", "o:"),
    }  # fmt: skip
    for (variant, steps), (colour, look) in looks.items():
        curves = np.array([
            r["by_distance"] for r in choice_learns()["runs"]
            if (r["variant"], r["steps"]) == (variant, steps)
        ])  # fmt: skip
        label = f"{variant}, {steps} steps" if variant == "NSA" else variant
        axis.plot(middle, curves.mean(0), look, color=PALETTE[colour], markersize=4, label=label)
        axis.fill_between(middle, curves.min(0), curves.max(0), color=PALETTE[colour], alpha=0.2)
    if live is not None:
        of_bin = [live["back"] // bins == i for i in range(edges)]
        shares = [100 * live["right"][b].float().mean().item() for b in of_bin]
        axis.plot(middle, shares, "s-", color=PALETTE["query"], markersize=4, label="yours")
    axis.axvline(train_choice.BUDGET, color=PALETTE["text"], linewidth=0.8)
    axis.text(train_choice.BUDGET + 8, 32, f"the window of {train_choice.BUDGET}\nends here",
              fontsize=9)  # fmt: skip
    axis.set(xlim=(0, train_choice.ENTRIES), ylim=(0, 106))
    axis.set_xlabel("how many entries back the answer stands", fontsize=9)
    axis.set_ylabel("right answers, percent", fontsize=9)
    axis.legend(loc="lower right", bbox_to_anchor=(1, 0.1), fontsize=9, frameon=False)
    if live is not None:
        far = train_choice.percent(live)
        return Picture(figure, f"Yours gets {far:.0f}% of the far answers right")
    near = stored_mean("NSA", 450, "middle")
    low, high = train_choice.RANGES["middle"]
    told = (
        f"NSA answers from afar, and misses some near: {near:.0f}% of those {low} to {high - 1} "
        f"back, the window {stored_mean('window', 150, 'middle'):.0f}%"
    )
    return Picture(figure, told)


# -- tests, and broken implementations --


def mutants() -> dict[str, Callable]:
    """The chapter's solution, and three broken ones, by what is broken in them."""
    whole = solutions.native_sparse_attention
    edits = {
        "a summary is seen from its first token": (
            "compressed_attention(q, k_cmp, v_cmp, length, stride)",
            "compressed_attention(q, k_cmp, v_cmp, 1, stride)",
        ),
        "the last query's list, for all": (
            "values[1], ids,",
            "values[1], ids[-1:].expand_as(ids),",
        ),
        "a window one key too wide": ("values[2], window_size", "values[2], window_size + 1"),
    }
    return {"right": whole} | {name: Edited(whole, dict([edit])) for name, edit in edits.items()}


def draw_tests(passed: dict[str, dict[str, bool]]) -> Picture:
    """Which implementation passes which test.

    Args:
        passed: by implementation, then by test.
    """
    tests = list(next(iter(passed.values())))
    figure, axes = new_figure(8.0, 0.42 * len(passed) + 0.7)
    axis = axes[0, 0]
    for row, results in enumerate(passed.values()):
        for column, holds in enumerate(results.values()):
            colour = PALETTE["masked"] if holds else PALETTE["query"]
            axis.add_patch(Rectangle((column + 0.04, row + 0.08), 0.92, 0.84, color=colour))
            axis.text(column + 0.5, row + 0.5, "passes" if holds else "fails", ha="center",
                      va="center", fontsize=9, color=readable_on(colour))  # fmt: skip
    axis.set(xlim=(0, len(tests)), ylim=(len(passed), 0))
    axis.set_yticks(np.arange(len(passed)) + 0.5, list(passed))
    axis.set_xticks(np.arange(len(tests)) + 0.5, tests)
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    broken = {name: results for name, results in passed.items() if name != "right"}
    found = {test: sum(not results[test] for results in broken.values()) for test in tests}
    told = ", ".join(f"{test} {count}" for test, count in found.items())
    return Picture(figure, f"How many of {len(broken)} broken ones a test finds: {told}")


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
