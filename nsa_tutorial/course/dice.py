"""Chapter 01's experiment: what a model makes of a mask that comes too late.

Fair dice are rolled, four in a row, and a small model guesses each next roll from those before it.
Nobody can do better than one in six. The model has one attention head, and how its scores become
weights is the caller's choice: where the weights of what is visible depend on what is hidden, the
model learns to read the next roll from them.

New rolls in every step, so nothing can be learned by heart. A run takes about half a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from nsa_tutorial.course.figures import INKS, PALETTE, Picture, new_figure

SIDES, ROLLS, WIDTH = 6, 4, 16
STEPS, BATCH, RATE = 400, 64, 0.01
_SMOOTH = 20  # steps whose average is a point of the picture


class Guesser(nn.Module):
    """One attention head over four rolls, then a small network that guesses each next roll."""

    def __init__(self, weigh: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weigh = weigh  # from scores [B, 4, 4] to weights
        self.roll, self.place = nn.Embedding(SIDES, WIDTH), nn.Embedding(ROLLS, WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.guess = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, SIDES))

    def forward(self, rolls: Tensor) -> Tensor:
        """Rolls [B, 4] to six numbers for each roll but the last, [B, 3, 6]."""
        x = self.roll(rolls) + self.place.weight  # [B, 4, 16]: a vector for each roll
        scores = self.q(x) @ self.k(x).mT / WIDTH**0.5  # [B, 4, 4]
        return self.guess(self.weigh(scores) @ self.v(x))[:, :-1]


class Run(NamedTuple):
    """A trained model.

    Attributes:
        right: the share of next rolls that it guesses right, on rolls that it was not trained on.
        course: the same share in every step of its training, on that step's new rolls.
        model: with the weights that it has at the end.
    """

    right: float
    course: list[float]
    model: Guesser


def train(weigh: Callable[[Tensor], Tensor], seed: int = 0, steps: int = STEPS) -> Run:
    """Train a model to guess the next roll, and try it on 50,000 new rows of dice.

    Args:
        weigh: from scores `[B, 4, 4]` to weights of the same shape.
        seed: of the dice and of the model's first weights.
        steps: of training, each with new dice.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are so small that several threads would mostly wait
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, course = Guesser(weigh), []
            optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
            for _ in range(steps):
                loss, right = _try(model, BATCH)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                course.append(right)
            with torch.no_grad():
                return Run(_try(model, 50_000)[1], course, model)
    finally:
        torch.set_num_threads(threads)


def _try(model: Guesser, rows: int) -> tuple[Tensor, float]:
    """Loss and share of right guesses on new rolls."""
    rolls = torch.randint(SIDES, (rows, ROLLS))
    guesses, coming = model(rolls).flatten(0, 1), rolls[:, 1:].flatten()
    return cross_entropy(guesses, coming), (guesses.argmax(-1) == coming).float().mean().item()


def left_over(model: Guesser) -> Tensor:
    """What the first of four rolls has left of its weight, `[rolls seen, next rolls, others]`.

    The first roll sees itself alone. For each roll that it may be and each that may come next, all
    36 pairs of the two rolls after that.
    """
    rolls = torch.cartesian_prod(*ROLLS * [torch.arange(SIDES)])
    with torch.no_grad():
        x = model.roll(rolls) + model.place.weight
        weights = model.weigh(model.q(x) @ model.k(x).mT / WIDTH**0.5)
    return weights[:, 0, 0].view(SIDES, SIDES, SIDES**2)


def draw_left_over(run: Run) -> Picture:
    """The weight that the first roll keeps, against the hidden next roll; a dot for each first
    roll."""
    left = left_over(run.model).median(2).values  # [rolls seen, next rolls]
    figure, axes = new_figure(7.4, 2.7)
    axis = axes[0, 0]
    for seen in range(SIDES):
        axis.plot(range(1, SIDES + 1), left[seen], "o", color=PALETTE["query"], alpha=0.5)
    for coming, weight in enumerate(left.median(0).values.tolist(), 1):
        axis.annotate(f"{weight:.2g}", (coming, weight), xytext=(9, 0),
                      textcoords="offset points", va="center", fontsize=9,
                      color=INKS["query"])  # fmt: skip
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_ylim(left.min() / 2, 2)
    axis.set_xlim(0.6, SIDES + 0.8)
    axis.set_xlabel("the next roll, hidden by the mask", fontsize=9)
    axis.set_ylabel("weight left over", fontsize=9)
    order = left.argsort(1)
    same = "one weight" if (left.amax() - left.amin()) < 1e-3 else "a weight of its own"
    if bool((order == order[0]).all()):
        return Picture(figure, f"Each hidden next roll leaves {same}, whatever roll is seen")
    return Picture(figure, f"Each hidden next roll leaves {same}")


def draw(late: Run, early: Run) -> Picture:
    """Right guesses while two models train: one's mask comes after the softmax, the other's
    before it."""
    figure, axes = new_figure(7.4, 3.2)
    axis = axes[0, 0]
    for run, colour, name in (
        (late, "query", "mask after the softmax"),
        (early, "text", "mask before the softmax"),
    ):
        heights = 100 * torch.tensor(run.course).view(-1, _SMOOTH).mean(1)
        steps = [_SMOOTH * (i + 0.5) for i in range(len(heights))]
        axis.plot(steps, heights, color=PALETTE[colour], linewidth=2)
        axis.annotate(f"{name}: {run.right:.0%}", (steps[-1], heights[-1]), xytext=(0, 7),
        textcoords="offset points", ha="right", fontsize=9, color=PALETTE[colour])  # fmt: skip
    axis.axhline(100 / SIDES, color=PALETTE["faint"], linewidth=1, linestyle="--")
    axis.text(4, 100 / SIDES - 3, "1 of 6", fontsize=9, va="top", color=PALETTE["text"])
    axis.set_xlim(0, STEPS)
    axis.set_ylim(0, 115)
    axis.set_yticks([0, 25, 50, 75, 100])
    axis.set_xlabel("steps of training", fontsize=9)
    axis.set_ylabel("next rolls guessed right, %", fontsize=9)
    finding = f"{late.right:.0%} with the mask after the softmax, {early.right:.0%} with it before"
    return Picture(figure, f"Next rolls guessed right: {finding}")
