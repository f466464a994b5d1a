"""What several GPUs compute, hold and send for one layer's Native Sparse Attention, by counting.

Sizes are those of the course's recordings: 64 query heads over 4 KV heads, width 128, lists of 16
blocks of 64, a window of 512, summaries of 32 tokens, one every 16, bf16.

Symbols: `R` ranks · `N` tokens of the whole text · `n` of a rank.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from nsa_tutorial.course import costs
from nsa_tutorial.training.many_gpus.cuts import Cut
from nsa_tutorial.training.many_gpus.volume import Widths, bytes_moved

ASSETS = Path(__file__).resolve().parents[2] / "assets"
HQ, H, D = 64, 4, 128
ROW = H * 2 * D * 2  # bytes of a token's keys and values
LONG = 1 << 20

# -- what is computed --


def products(start: int, stop: int, attention: str = "nsa") -> int:
    """Vectors that the queries `[start, stop)` multiply with, in one query head: each key for its
    score, and each value for the sum. NSA scores a summary twice, for attention and for the choice.

    >>> products(0, 4, "dense"), products(4, 8, "dense")
    (20, 52)
    """
    queries = stop - start
    if attention == "dense":
        return 2 * costs.visible_pairs(queries, stop)
    lists = costs.selected_keys(queries, stop) + costs.window_keys(queries, stop)
    return 3 * costs.summary_keys(queries, stop) + 2 * lists


def work(cut: Cut, attention: str = "nsa") -> list[int]:
    """The products of each rank."""
    spans = cut.spans
    return [sum(products(*spans[piece], attention) for piece in cut.pieces(rank))
            for rank in range(cut.ranks)]  # fmt: skip


def idle_share(cut: Cut, attention: str = "nsa") -> float:
    """The share of its time that a rank waits for the slowest one, on average, if products are all
    that takes time.

    >>> round(idle_share(Cut(4, 65_536, "contiguous"), "dense"), 2)
    0.43
    """
    by_rank = work(cut, attention)
    return 1 - sum(by_rank) / (len(by_rank) * max(by_rank)) if max(by_rank) else 0.0


# -- what is held --


def held(tokens: int, ranks: int) -> dict[str, int]:
    """Bytes of one layer on one rank at the end of its forward, by name.

    >>> {name: size / 2**30 for name, size in held(1 << 20, 4).items()}
    {'queries': 4.0, 'outputs': 4.0, 'own keys and values': 0.5, 'gathered': 1.5}
    """
    n = -(-tokens // ranks)
    return {
        "queries": n * HQ * D * 2,
        "outputs": n * HQ * D * 2,
        "own keys and values": n * ROW,
        "gathered": (tokens - n) * ROW,
    }


# -- what travels --


def sent(cut: Cut, rank: int = 0, *, backward: bool = False) -> dict[str, int]:
    """Bytes that a rank sends, by what travels. Each branch has keys and values of its own, so the
    window's need a halo alone."""
    return bytes_moved(cut, rank, Widths(H, D, D, sets=3), backward=backward)


@functools.cache
def sent_in_all(cut: Cut) -> int:
    """Bytes that a rank in the middle sends, forward and backward. At both ends, halos are
    missing."""
    rank = cut.ranks // 2
    return sum(sum(sent(cut, rank, backward=way).values()) for way in (False, True))


# -- how long it takes --

# the steps of one layer whose time grows with the square of the text, and with its length
SQUARE = ("attention to summaries", "choice of blocks")
LINEAR = ("summaries", "lists and window at once", "gates")


@functools.cache
def recording() -> dict:
    """The steps of NSA, measured one by one at 65,536 tokens."""
    return json.loads((ASSETS / "selection_h200.json").read_text(encoding="utf-8"))


@functools.cache
def measured(name: str, directions: tuple[str, ...] = ("forward", "backward")) -> float:
    """Milliseconds of a step, forward and backward, on the queries of a smooth text."""
    rows = [r for r in recording()["rows"]
            if r["operator"] == "native" and r["kernel"] == "triton" and r["lists"] == "smooth"
            and r["change"] == name and r["direction"] in directions]  # fmt: skip
    return sum(r["ms"] for r in rows)


def seconds(
    tokens: int, steps: tuple[str, ...] = SQUARE + LINEAR,
    directions: tuple[str, ...] = ("forward", "backward"),
) -> float:  # fmt: skip
    """Seconds of steps of one layer on one GPU, forward and backward, as if each grew with the
    length, or with its square, from what was measured at 65,536 tokens on."""
    times = tokens / 65_536
    found = [measured(s, directions) * (times**2 if s in SQUARE else times) for s in steps]
    return sum(found) / 1e3


def crossing() -> int:
    """The length at which what grows with the square takes as long as the rest."""
    linear, square = (sum(map(measured, steps)) for steps in (LINEAR, SQUARE))
    return round(65_536 * linear / square)


# -- past this machine --


@dataclass(frozen=True)
class Machine:
    """GPUs in hosts of eight. Rates are of a data sheet, in bytes a second for each GPU, one way.

    Attributes:
        nvlink: between the GPUs of a host.
        infiniband: between hosts; all GPUs of a host bring in a part each, and share it by NVLink.
        host: GPUs of a host.
        layers, width: of a model, which keeps only each layer's input for the backward, and
            computes a layer again there.
    """

    nvlink: float = 450e9
    infiniband: float = 50e9
    host: int = 8
    layers: int = 30
    width: int = 2560


@dataclass(frozen=True)
class Plan:
    """One layer's attention on one of many GPUs: forward, the same again, and backward.

    Attributes:
        tokens, gpus: of the text.
        layer_bytes: this layer's queries, outputs and both gradients; keys, values and theirs.
        stream_bytes: the inputs of all layers.
        nvlink_bytes, infiniband_bytes: what comes in.
        compute_s: seconds of computing, if all GPUs have an equal share.
        choice_share: the part of it that grows with the square of the text.
        travel_s: seconds for what comes in, the slower of the two ways.
    """

    tokens: int
    gpus: int
    layer_bytes: int
    stream_bytes: int
    nvlink_bytes: int
    infiniband_bytes: int
    compute_s: float
    choice_share: float
    travel_s: float


def plan(tokens: int, gpus: int, machine: Machine = Machine()) -> Plan:
    """Count, for a text of `tokens` on `gpus`.

    Keys and values come twice, in bf16: a layer is computed again before its backward. Their
    gradients come back once, in fp32, so twice as many bytes.
    Of one KV head at a time the gradients of the whole text are held, and of the next one, too.
    """
    n = -(-tokens // gpus)
    gathered = tokens * ROW
    gradients = 2 * tokens * 2 * D * 4
    travels = 4 * gathered
    inside = min(gpus, machine.host)
    nvlink = travels * (inside - 1) // inside
    infiniband = travels * (gpus - inside) // gpus // inside
    ways = nvlink / machine.nvlink, infiniband / machine.infiniband
    square, whole = (
        seconds(tokens, steps) + seconds(tokens, steps, ("forward",))
        for steps in (SQUARE, SQUARE + LINEAR)
    )
    return Plan(
        tokens, gpus,
        layer_bytes=4 * n * HQ * D * 2 + gathered + gradients,
        stream_bytes=machine.layers * n * machine.width * 2,
        nvlink_bytes=nvlink, infiniband_bytes=infiniband, compute_s=whole / gpus,
        choice_share=square / whole, travel_s=max(ways),
    )  # fmt: skip


def plans() -> list[Plan]:
    """One and eight million tokens, on 8, 64 and 512 GPUs."""
    return [plan(tokens * LONG, gpus) for tokens in (1, 8) for gpus in (8, 64, 512)]


def table() -> str:
    """The plans as lines of a table; memory and what comes in are in GiB."""
    lines = ["            memory of a GPU        comes in by           seconds of a layer"]
    lines += ["text   GPUs   layer  inputs    NVLink  InfiniBand   travel  compute  N² part"]
    for p in plans():
        gib = [x / 2**30 for x in
               (p.layer_bytes, p.stream_bytes, p.nvlink_bytes, p.infiniband_bytes)]  # fmt: skip
        lines.append(
            f"{p.tokens >> 20:3}M {p.gpus:6} {gib[0]:7.1f} {gib[1]:7.1f} {gib[2]:9.1f} "
            f"{gib[3]:11.2f} {p.travel_s:8.3f} {p.compute_s:8.3f} {p.choice_share:8.1%}"
        )
    return "\n".join(lines)
