"""A rhyme, and a model of two layers of Native Sparse Attention that knows it by heart: chapter 15
lets it type.

    python -m nsa_tutorial.course.rhyme assets/rhyme.npz    train it anew, some minutes on a CPU

Each verse of "The House That Jack Built" (England, 1755) repeats the one before it. What comes next
often stands further back than the window reaches.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm.auto import tqdm

from nsa_tutorial.layer import NativeSparseAttention, NativeSparseAttentionConfig

WEIGHTS = Path(__file__).resolve().parents[2] / "assets" / "rhyme.npz"
_LINES = (
    "the house that Jack built",
    "the malt\nthat lay in ",
    "the rat\nthat ate ",
    "the cat\nthat killed ",
    "the dog\nthat worried ",
    "the cow with the crumpled horn\nthat tossed ",
    "the maiden all forlorn\nthat milked ",
    "the man all tattered and torn\nthat kissed ",
)
CONFIG = NativeSparseAttentionConfig(
    width=64, query_heads=4, kv_heads=1, key_width=16, value_width=16, block_size=16, top_n=5,
    window_size=32, length=16, stride=8, compression="mean", rotary_base=1000.0, gate_width=16,
    backend="reference",
)  # fmt: skip


def rhyme() -> str:
    """Eight verses, each a sentence, with an empty line between them."""
    verses = ["This is " + "".join(_LINES[i::-1]) + ".\n" for i in range(len(_LINES))]
    return "\n" + "\n".join(verses)


LETTERS = "".join(sorted(set(rhyme())))


def encode(text: str) -> Tensor:
    """Characters as numbers, `[N]`."""
    return torch.tensor([LETTERS.index(c) for c in text])


def decode(tokens: Tensor) -> str:
    """Numbers as characters."""
    return "".join(LETTERS[i] for i in tokens.tolist())


class Layer(nn.Module):
    """Attention, then two linear maps, each added to what comes in."""

    def __init__(self, config: NativeSparseAttentionConfig) -> None:
        super().__init__()
        width = config.width
        self.attention = NativeSparseAttention(config)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, attend: object = None) -> Tensor:
        """`[B, N, width]` to the same; `attend` stands in for the attention."""
        x = x + (attend or self.attention)(_normed(x))
        return x + self.mlp(_normed(x))


def _normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


class Model(nn.Module):
    """Characters to scores of the next one."""

    def __init__(self, config: NativeSparseAttentionConfig = CONFIG, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(LETTERS), config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(layers))
        self.head = nn.Linear(config.width, len(LETTERS))

    def forward(self, tokens: Tensor, attend: list | None = None) -> Tensor:
        """`tokens [B, N]` to `[B, N, letters]`.

        Args:
            tokens: numbers of `encode`.
            attend: what stands in for the attention of each layer: one that has a cache, say.
        """
        x = self.embedding(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, attend[i] if attend else None)
        return self.head(_normed(x))


def load() -> Model:
    """The model with its stored weights, in fp64: two ways to compute one number then agree."""
    model = Model()
    with np.load(WEIGHTS) as stored:
        model.load_state_dict({name: torch.from_numpy(stored[name]) for name in stored})
    return model.double().requires_grad_(False)


def train(steps: int = 700, seed: int = 0) -> Model:
    """Learn the rhyme by heart."""
    torch.manual_seed(seed)
    model, tokens = Model(), encode(rhyme())[None]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    bar = tqdm(range(steps), desc="training", mininterval=5)
    for _ in bar:
        scores = model(tokens[:, :-1])
        loss = F.cross_entropy(scores[0], tokens[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        right = (scores[0].argmax(-1) == tokens[0, 1:]).float().mean()
        bar.set_postfix(loss=f"{loss.item():.4f}", right=f"{right.item():.4f}")
    return model


def main(path: str) -> None:
    """Train, and store the weights as halves."""
    weights = {name: x.half().numpy() for name, x in train().state_dict().items()}
    np.savez_compressed(path, **weights)


if __name__ == "__main__":
    main(sys.argv[1])
