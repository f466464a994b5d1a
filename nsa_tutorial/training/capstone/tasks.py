"""What the capstone trains on. The texts of a step are a function of the seed and the step, so that
a run that was stopped goes on with the texts it would have had.

    task = task_of(settings)
    texts = task.texts(step)
"""

from __future__ import annotations

import pydoc_data.topics
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_tutorial.training.capstone.settings import Settings

NONE = -100  # where no token is asked for
HELD_OUT = 10**9  # the first of the steps that no run trains on


class Texts(NamedTuple):
    """A batch of texts.

    Attributes:
        tokens: `[batch, length]`.
        target: `[batch, length]`, the token that is to follow, or `NONE`.
        distance: `[batch, length]`, how many tokens back the answer was told, or `NONE`.
    """

    tokens: Tensor
    target: Tensor
    distance: Tensor


def generator(seed: int, step: int) -> torch.Generator:
    """The random numbers of one step."""
    return torch.Generator().manual_seed(seed * 2_147_483_647 + step)


@dataclass(frozen=True)
class Recall:
    """Multi-query associative recall (MQAR, arXiv 2312.04927), with questions all along the text.

    A text is a row of pairs, each a key and its value. Four in ten repeat an earlier pair: a
    question, for the key is there and the value can be told. Distances are drawn evenly on a
    logarithmic scale, because a model learns from near questions first. Only the first question for
    a pair counts, because a second one would find its answer in the first.

    Attributes:
        length, batch, seed: as in the settings.
        values: how many different ones. A guess is right once in so many.
    """

    length: int
    batch: int
    seed: int
    values: int = 64

    @property
    def keys(self) -> int:
        """Different keys; a text tells a key once."""
        return self.length // 2

    @property
    def vocabulary(self) -> int:
        """Different tokens: the keys, then the values."""
        return self.keys + self.values

    def texts(self, step: int) -> Texts:
        """The texts of a step."""
        g, B, P = generator(self.seed, step), self.batch, self.length // 2
        place = torch.arange(P)  # of a pair in the text
        is_question = torch.rand(B, P, generator=g) < 0.4
        is_question[:, 0] = False

        # -- the earlier pair that each question repeats, and itself for a new one --
        back = torch.exp(torch.rand(B, P, generator=g) * (place + 1).log()).long()  # 1 … place
        newest = torch.where(is_question, 0, place).cummax(1).values  # the last new pair so far
        told = newest.gather(1, (place - back).clamp(min=0))
        told = torch.where(is_question, told, place)

        # -- the first question for each pair --
        asked = torch.where(is_question, place, P)
        first = torch.full((B, P), P).scatter_reduce(1, told, asked, "amin")
        counts = is_question & (first.gather(1, told) == place)

        # -- tokens --
        key = torch.rand(B, P, generator=g).argsort(1).gather(1, told)
        value = torch.randint(self.values, (B, P), generator=g).gather(1, told) + self.keys
        target, distance = torch.full((2, B, P, 2), NONE)
        target[..., 0] = value.where(counts, NONE)
        distance[..., 0] = (2 * (place - told)).where(counts, NONE)
        tokens = torch.stack([key, value], -1)
        return Texts(tokens.flatten(1), target.flatten(1), distance.flatten(1))


@cache
def corpus() -> Tensor:
    """The pages that `help()` shows, which come with Python: `[bytes]` of ASCII."""
    pages = sorted(pydoc_data.topics.topics.items())
    text = "\n".join(page for _, page in pages).encode("ascii", "ignore")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


@dataclass(frozen=True)
class Bytes:
    """English text byte by byte. The last tenth of the corpus is held out."""

    length: int
    batch: int
    seed: int

    vocabulary = 256

    def texts(self, step: int) -> Texts:
        """The texts of a step."""
        text, end = corpus(), len(corpus()) * 9 // 10
        text = text[:end] if step < HELD_OUT else text[end:]
        most = len(text) - self.length
        if most < 1:
            raise ValueError(
                f"length: got {self.length}, expected less than the {len(text):,} bytes of text"
            )
        g = generator(self.seed, step)
        first = torch.randint(most, (self.batch, 1), generator=g)
        tokens = text[first + torch.arange(self.length + 1)]
        return Texts(tokens[:, :-1], tokens[:, 1:], torch.full_like(tokens[:, 1:], NONE))


@dataclass(frozen=True)
class Needle:
    """The pairs and questions of `Recall`, hidden in English text. A key is one of the bytes 128 …
    191, a value one of 192 … 255, which the text has not.

    Attributes:
        length, batch, seed: as in the settings.
        pairs: of a text, questions among them; at most 64.
    """

    length: int
    batch: int
    seed: int
    pairs: int = 64

    vocabulary = 256

    def texts(self, step: int, depth: float | None = None) -> Texts:
        """The texts of a step.

        Args:
            step: which.
            depth: hide one more pair here, 0 at the beginning of the text and 1 at its end, and ask
                for it at the end, and for nothing else; None asks for the others.
        """
        g, B, room = generator(self.seed, step), self.batch, self.length // 2
        n = min(self.pairs, room // 2)
        tokens = Bytes(self.length, B, self.seed).texts(step).tokens.clone()
        hidden = Recall(2 * self.pairs, B, self.seed).texts(step)
        place = torch.rand(B, room - 1, generator=g).argsort(1)[:, :n].sort(1).values
        pair = hidden.tokens.unflatten(1, (-1, 2))[:, :n] + 128  # keys, then values
        for i in range(2):
            tokens.scatter_(1, 2 * place + i, pair[..., i])
        target, distance = torch.full((2, B, self.length), NONE)
        if depth is None:
            answer, back = (x[:, : 2 * n : 2] for x in (hidden.target, hidden.distance))
            told = (torch.arange(n) - back // 2).where(answer != NONE, 0)
            far = 2 * (place - place.gather(1, told))
            target.scatter_(1, 2 * place, (answer + 128).where(answer != NONE, NONE))
            distance.scatter_(1, 2 * place, far.where(answer != NONE, NONE))
        else:
            is_used = torch.zeros(B, 64).scatter_(1, pair[..., 0] - 128, 1.0)
            key, value = is_used.argmin(1) + 128, torch.randint(192, 256, (B,), generator=g)
            first = 2 * round(depth * (room - 2))
            for at in (first, self.length - 2):
                tokens[:, at], tokens[:, at + 1] = key, value
            target[:, -2], distance[:, -2] = value, self.length - 2 - first
        return Texts(tokens, target, distance)


def task_of(settings: Settings) -> Recall | Needle | Bytes:
    """The task of a run."""
    task = {"recall": Recall, "needle": Needle, "bytes": Bytes}[settings.task]
    return task(settings.length, settings.batch, settings.seed)
