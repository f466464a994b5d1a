"""Where does the choice of blocks learn? Train small models on phone books, and count which answers
they get right.

    python -m nsa_tutorial.course.train_choice                  writes assets/choice_learns.json
    python -m nsa_tutorial.course.train_choice --seeds 1 --out choice.json

A phone book has 256 entries. Each tells a random name with its number, and asks for the number of a
name told so far. `Layer` is a layer of one head. As in the paper (section 3.3.3), each branch has
keys and values of its own, and all three share the queries. So the scores that choose the blocks
belong to the compressed branch alone: they learn through its output, or not at all. `VARIANTS` are
what is compared:

    NSA                        lists chosen by the weights of the summaries
    compression muted          the same, with compression's gate at 0 from the first step on
    random lists               the free slots of each list are drawn at random
    window                     a window of as many keys as NSA loads
    dense                      every entry so far
    shared keys                NSA with one set of keys and values for all three branches
    shared keys, muted         the same, with compression's gate at 0 from the first step on

Each variant is trained from several seeds. After some steps (`CHECKPOINTS`) it answers 32 new
books. `main` stores, for each, the share of right answers by how far back the answer stands, and
how often the answer's block is on the list.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, one_hot

from nsa_tutorial.course.threads import one_thread
from nsa_tutorial.course.train_heads import processor

COMMAND = "python -m nsa_tutorial.course.train_choice"
PATH = Path(__file__).resolve().parents[2] / "assets" / "choice_learns.json"
ENTRIES, NAME_WIDTH, NUMBERS = 256, 64, 16  # of a phone book; the numbers are 0 to 15
BLOCK_SIZE, TOP_N, WINDOW = 8, 6, 16
# what a query loads at most: the summaries, the list, the window
BUDGET = ENTRIES // BLOCK_SIZE + TOP_N * BLOCK_SIZE + WINDOW
BATCH, STEPS, RATE = 4, 450, 0.03  # of the training
CHECKPOINTS = (150, 450)
BINS = 16  # entries back that are counted together
RANGES = {"near": (0, 16), "middle": (16, BUDGET), "far": (BUDGET, ENTRIES)}


# -- the task --


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


# -- three branches of one head, for a batch --


def attend(q: Tensor, k: Tensor, v: Tensor, is_seen: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of `q [B, N, D]` to the keys that it sees, and its weights `[B, N, M]`; a query
    that sees none gets 0."""
    s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~is_seen, -math.inf)
    weights = torch.softmax(s, -1).nan_to_num(0)
    return weights @ v, weights


def choose(score: Tensor) -> Tensor:
    """Which blocks each query lists, `[B, N, blocks]`: the first, the latest two, and those of the
    highest `score [B, N, blocks]`, between 0 and 1. A choice passes no gradient on."""
    _, N, blocks = score.shape
    block, own = torch.arange(blocks), torch.arange(N)[:, None] // BLOCK_SIZE
    score = score.detach().masked_fill(block > own, -1)
    score = score.masked_fill((block == 0) | (block == own) | (block == own - 1), 2)
    return torch.zeros_like(score).scatter(2, score.topk(TOP_N).indices, 1).bool()


def nsa(
    q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], gates: Sequence[Tensor],
    at_random: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """NSA of one head, with means of blocks for summaries: the gated sum `[B, N, DV]`, and the
    lists `[B, N, blocks]`, whose free slots `at_random` may draw."""
    t = torch.arange(q.shape[1])
    back = t[:, None] - t
    k_cmp, v_cmp = (x.unflatten(1, (-1, BLOCK_SIZE)).mean(2) for x in (keys[0], values[0]))
    end = (torch.arange(k_cmp.shape[1]) + 1) * BLOCK_SIZE - 1
    o_cmp, score = attend(q, k_cmp, v_cmp, end <= t[:, None])
    if at_random is not None:
        score = torch.rand(score.shape, generator=at_random)
    listed = choose(score)
    o_slc, _ = attend(q, keys[1], values[1], listed.repeat_interleave(BLOCK_SIZE, -1) & (back >= 0))
    o_swa, _ = attend(q, keys[2], values[2], (back >= 0) & (back < WINDOW))
    outputs = zip(gates, (o_cmp, o_slc, o_swa), strict=True)
    return sum(g[..., None] * o for g, o in outputs), listed


# -- what is compared --


def three_branches(
    at_random: torch.Generator | None = None, is_muted: bool = False
) -> Callable[..., tuple[Tensor, Tensor]]:
    """What `Layer` calls to attend: `nsa`, with its variants."""

    def mix(q: Tensor, keys: list, values: list, gates: list) -> tuple[Tensor, Tensor]:
        if is_muted:
            gates = [0 * gates[0], *gates[1:]]
        return nsa(q, keys, values, gates, at_random)

    return mix


def latest(window: int) -> Callable[..., tuple[Tensor, None]]:
    """What `Layer` calls to attend: the latest `window` entries; gates are not used."""

    def mix(q: Tensor, keys: list, values: list, gates: list) -> tuple[Tensor, None]:
        t = torch.arange(q.shape[1])
        back = t[:, None] - t
        return attend(q, keys[-1], values[-1], (back >= 0) & (back < window))[0], None

    return mix


class Variant(NamedTuple):
    """What a layer calls to attend, made from a seed, and how many sets of keys it has."""

    mix: Callable[[int], Callable]
    sets: int = 3
    steps: int = STEPS


VARIANTS = {
    "NSA": Variant(lambda seed: three_branches()),
    "compression muted": Variant(lambda seed: three_branches(is_muted=True)),
    "random lists": Variant(lambda seed: three_branches(torch.Generator().manual_seed(seed))),
    "window": Variant(lambda seed: latest(BUDGET), 1, 150),
    "dense": Variant(lambda seed: latest(ENTRIES), 1, 150),
    "shared keys": Variant(lambda seed: three_branches(), 1, 150),
    "shared keys, muted": Variant(lambda seed: three_branches(is_muted=True), 1, 150),
}


class Layer(nn.Module):
    """A layer of one head, which scores the 16 numbers: `[B, N, 144]` to `[B, N, 16]`."""

    def __init__(self, mix: Callable, seed: int = 0, sets: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.mix, self.sets, width = mix, sets, 2 * NAME_WIDTH + NUMBERS
        self.q = nn.Linear(width, 64, bias=False)
        self.k = nn.Linear(width, sets * 64, bias=False)  # keys of each branch's own
        self.v = nn.Linear(width, sets * 32, bias=False)
        self.gate, self.o = nn.Linear(width, 3), nn.Linear(32, NUMBERS)

    def forward(self, x: Tensor, is_open: Sequence[float] = (1, 1, 1)) -> tuple[Tensor, Tensor]:
        """Scores, and the lists; `is_open` closes gates."""
        gates = torch.sigmoid(self.gate(x)) * torch.tensor(is_open)
        copies = 3 // self.sets  # one set serves all three branches
        keys, values = (f(x).chunk(self.sets, -1) * copies for f in (self.k, self.v))
        o, listed = self.mix(self.q(x), keys, values, gates.unbind(-1))
        return self.o(o), listed


# -- training, and answers --


def training(model: nn.Module, seed: int = 0, steps: int = STEPS) -> Iterator[int]:
    """Train a model on new books by Adam; gives the number of each step that is done."""
    generator = torch.Generator().manual_seed(1000 + seed)
    adam = torch.optim.Adam(model.parameters(), lr=RATE)
    for step in range(1, steps + 1):
        with one_thread():
            book = phone_book(BATCH, generator)
            loss = cross_entropy(model(book.x)[0].flatten(0, 1), book.answer.flatten())
            adam.zero_grad()
            loss.backward()
            adam.step()
        yield step


@torch.no_grad()
def answers(
    model: nn.Module, is_open: Sequence[float] = (1, 1, 1), books: int = 32
) -> dict[str, Tensor]:
    """Whether answers on new books are right, whether their block is listed, and how far back they
    stand: `right`, `listed` and `back`, `[books, ENTRIES]` each; no `listed` without lists."""
    book = phone_book(books, torch.Generator().manual_seed(2))
    with one_thread():
        scores, lists = model(book.x, is_open)
    found = {"right": scores.argmax(-1) == book.answer, "back": book.back}
    if lists is not None:
        block = (torch.arange(ENTRIES) - book.back) // BLOCK_SIZE
        found["listed"] = lists.gather(2, block[..., None])[..., 0]
    return found


def percent(given: dict[str, Tensor], what: str = "right", span: str = "far") -> float:
    """The share of `answers` that are right or listed, in percent, in one of `RANGES`."""
    low, high = RANGES[span]
    is_in = (given["back"] >= low) & (given["back"] < high)
    return 100 * given[what][is_in].float().mean().item()


def report(model: nn.Module) -> dict[str, object]:
    """What is stored of a model: percentages."""
    given = answers(model)
    whats = [what for what in ("right", "listed") if what in given]
    told = {what: {s: round(percent(given, what, s), 1) for s in RANGES} for what in whats}
    bins = [given["back"] // BINS == i for i in range(ENTRIES // BINS)]
    told["by_distance"] = [round(100 * given["right"][b].float().mean().item(), 1) for b in bins]
    if "listed" in given:
        closed = {"compression": (0, 1, 1), "selection": (1, 0, 1), "window": (1, 1, 0)}
        told["gate_closed"] = {
            name: {span: round(percent(answers(model, gates), "right", span), 1) for span in RANGES}
            for name, gates in closed.items()
        }
    return told


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0 on")
    parser.add_argument("--steps", type=int, default=STEPS, help="at most, of each variant")
    parser.add_argument("--out", type=Path, default=PATH, help=f"assets/{PATH.name}, if not given")
    chosen = parser.parse_args(arguments)
    begin, runs = time.perf_counter(), []
    for name, variant in VARIANTS.items():
        for seed in range(chosen.seeds):
            model = Layer(variant.mix(seed), seed, variant.sets)
            steps = min(variant.steps, chosen.steps)
            for step in training(model, seed, steps):
                if step in CHECKPOINTS or step == steps:
                    runs.append({"variant": name, "seed": seed, "steps": step, **report(model)})
                    seconds = time.perf_counter() - begin
                    far = runs[-1]["right"]["far"]
                    print(f"{name}, seed {seed}, {step} steps: far {far} %, {seconds:.0f} s",
                          flush=True)  # fmt: skip
    facts = {
        "command": f"{COMMAND} --seeds {chosen.seeds} --steps {chosen.steps}",
        "machine": processor(),
        "threads": 1,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seconds": round(time.perf_counter() - begin),
        "seeds": chosen.seeds,
        "books": 32,
        "keys_loaded_at_most": BUDGET,
        "ranges": RANGES,
        "runs": runs,
    }
    chosen.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
