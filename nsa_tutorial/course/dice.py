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

from nsa_tutorial.course.figures import PALETTE, Picture, new_figure

SIDES, ROLLS, WIDTH = 6, 4, 16
STEPS, BATCH, RATE = 400, 64, 0.01
_SMOOTH = 20  # steps whose average is a point of the picture


class Run(NamedTuple):
    """A trained model.

    Attributes:
        right: the share of next rolls that it guesses right, on rolls that it was not trained on.
        course: the same share in every step of its training, on that step's new rolls.
    """

    right: float
    course: list[float]


class _Guesser(nn.Module):
    """One attention head over the rolls and their positions, then a small network that guesses."""

    def __init__(self, weigh: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weigh = weigh
        self.roll, self.position = nn.Embedding(SIDES, WIDTH), nn.Embedding(ROLLS, WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.guess = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, SIDES))

    def forward(self, rolls: Tensor) -> Tensor:
        """Rolls `[B, ROLLS]` to scores of each side as the next roll `[B, ROLLS - 1, SIDES]`."""
        x = self.roll(rolls) + self.position.weight  # [B, ROLLS, WIDTH]
        scores = self.q(x) @ self.k(x).mT / WIDTH**0.5  # [B, ROLLS, ROLLS]
        return self.guess(self.weigh(scores) @ self.v(x))[:, :-1]


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
            model, course = _Guesser(weigh), []
            optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
            for _ in range(steps):
                loss, right = _try(model, BATCH)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                course.append(right)
            with torch.no_grad():
                return Run(_try(model, 50_000)[1], course)
    finally:
        torch.set_num_threads(threads)


def _try(model: _Guesser, rows: int) -> tuple[Tensor, float]:
    """Loss and share of right guesses on new rolls."""
    rolls = torch.randint(SIDES, (rows, ROLLS))
    guesses, coming = model(rolls).flatten(0, 1), rolls[:, 1:].flatten()
    return cross_entropy(guesses, coming), (guesses.argmax(-1) == coming).float().mean().item()


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
