"""Attention of a trained model: a few heads' queries, keys and values, and where their attention
goes.

`load()` reads what `train_heads.py` stored: the heads of a small byte-level model on 512 bytes of
Python that it was not trained on. The functions here compute exact attention weights and measure
them: how much goes to the start, to the byte before, to the place where the same words stood
earlier, and how much of it the best few blocks of keys hold.

It trains nothing, draws nothing, and chooses blocks only by the true weights, which no kernel knows
in advance (chapter 07 does it from cheap scores).

Symbols: `N` positions, `HQ` query heads, `H` key/value heads, `G = HQ // H`, `D` head width, `BS`
block size, `NB` blocks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nsa_tutorial.exact.dense_attention import causal_mask, softmax
from nsa_tutorial.exact.grouped_query_attention import expand_kv_heads, group_size

PATH = Path(__file__).resolve().parents[2] / "assets" / "heads.npz"
COMMAND = "python -m nsa_tutorial.course.train_heads"


@dataclass(frozen=True)
class Heads:
    """Queries, keys and values of some heads of a trained model on one text.

    Attributes:
        q: queries `[1, N, HQ, D]`, fp32 (stored as fp16), after the rotary embedding:
            `softmax(D ** -0.5 · q kᵀ)` is the attention.
        k, v: keys, after the rotary embedding, and values `[1, N, H, D]`, fp32. Query head `hq`
            reads KV head `hq // G`. KV heads may come from different layers of the model.
        text: the `N` bytes that the positions stand for. Byte 0, which begins every text of this
            model, stands at position 0.
        labels: where each query head sits in the model, such as "layer 2 head 5", both counted from
            0.
        info: how the model was made: command, versions, seed, steps, parameters, held-out loss,
            time, machine, source of the text.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    text: bytes
    labels: tuple[str, ...]
    info: dict

    @property
    def G(self) -> int:
        """Query heads that share a KV head."""
        return group_size(self.q.shape[2], self.k.shape[2])

    def token(self, position: int) -> str:
        """The byte at a position, readable: its character, or a sign for the start, a space and the
        end of a line."""
        byte = self.text[position]
        return {0: "⟨start⟩", 9: "→", 10: "↵", 32: "␣"}.get(
            byte, chr(byte) if byte < 128 else f"\\x{byte:02x}"
        )


def load(path: Path = PATH) -> Heads:
    """The stored heads.

    Raises:
        FileNotFoundError: naming the command that makes them.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"there is no {path.parent.name}/{path.name}: run '{COMMAND}' to train the model and "
            "store its heads"
        )
    with np.load(path, allow_pickle=False) as stored:
        q, k, v = (torch.from_numpy(stored[name]).float()[None] for name in "qkv")
        text, info = stored["text"].tobytes(), json.loads(str(stored["info"]))
    return Heads(q, k, v, text, tuple(info["labels"]), info)


# -- exact attention --


def attention_weights(q: Tensor, k: Tensor) -> Tensor:
    """Causal attention weights in fp64, `[B, HQ, N, N]`, of `q` `[B, N, HQ, D]` and `k`
    `[B, N, H, D]`; every row sums to 1."""
    (_, N, HQ, D), H = q.shape, k.shape[2]
    k = expand_kv_heads(k, group_size(HQ, H)).double()  # [B, N, HQ, D]
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k) * D**-0.5  # [B, HQ, N, N]
    return softmax(scores.masked_fill(~causal_mask(N, N, q.device), -torch.inf))


# -- what a head looks at --


def first_share(weights: Tensor) -> Tensor:
    """The share of attention that goes to position 0, per head: `[..., N, N]` to `[...]`, averaged
    over the queries after it."""
    return weights[..., 1:, 0].mean(-1)


def previous_share(weights: Tensor) -> Tensor:
    """The share of attention that goes to the position just before the query, per head:
    `[..., N, N]` to `[...]`."""
    return weights.diagonal(-1, -2, -1).mean(-1)


def copy_targets(text: bytes, gram: int = 8, apart: int = 64) -> Tensor:
    """Where a head that copies would look: bool `[N, N]`.

    `[i, j]` is True where the `gram` bytes before `j` are the `gram` bytes that end with `i`,
    `apart` positions or more earlier:
    what stood at `j` then is a good guess for what comes after `i`.
    """
    N = len(text)
    target = torch.zeros(N, N, dtype=torch.bool)
    for i in range(gram - 1, N):
        for j in range(gram, i - apart + 2):
            target[i, j] = text[j - gram : j] == text[i - gram + 1 : i + 1]
    return target


def copy_share(weights: Tensor, targets: Tensor) -> Tensor:
    """The share of attention on `copy_targets`, per head: `[..., N, N]` to `[...]`, averaged over
    the queries that have one.

    Raises:
        ValueError: if no query has a target.
    """
    queries = targets.any(-1)
    if not queries.any():
        raise ValueError("targets: the text repeats nothing at this distance")
    return (weights * targets).sum(-1)[..., queries].mean(-1)


# -- how much the best blocks hold --


def block_mass(weights: Tensor, block_size: int) -> Tensor:
    """Attention per block of keys: `[..., N, N]` to `[..., N, NB]`; the last block may be short."""
    padding = -weights.shape[-1] % block_size
    return torch.nn.functional.pad(weights, (0, padding)).unflatten(-1, (-1, block_size)).sum(-1)


def top_mass(weights: Tensor, block_size: int, n: int, G: int = 1) -> Tensor:
    """The share of each query's attention that its best `n` blocks hold: `[..., HQ, N, N]` to
    `[..., HQ, N]`.

    Args:
        weights: attention weights.
        block_size: keys per block.
        n: blocks chosen per query, at least 1.
        G: query heads that must share one choice. 1 lets each head choose for itself; the group
            size makes the heads of a group share the blocks that hold most of their summed
            attention, as NSA does (arXiv 2502.11089, Eq. 10).
    """
    mass = block_mass(weights, block_size)  # [..., HQ, N, NB]
    grouped = mass.unflatten(-3, (-1, G))  # [..., H, G, N, NB]
    # [..., H, 1, N, n]
    chosen = grouped.sum(-3, keepdim=True).topk(min(n, mass.shape[-1]), dim=-1).indices
    return grouped.gather(-1, chosen.expand(*grouped.shape[:-1], -1)).sum(-1).flatten(-3, -2)


def attention_mass(heads: Heads, block_size: int, n: int, *, per_group: bool = False) -> Tensor:
    """The exact share of attention that the best `n` blocks hold, `[HQ]`, averaged over the queries
    with more than `n` blocks.

    Args:
        heads: from `load`.
        block_size: keys per block.
        n: blocks per query, at least 1.
        per_group: let the `G` heads of a group share one choice, instead of one choice per head.

    Returns:
        fp64 `[HQ]`; 1 where no query has more than `n` blocks.
    """
    # [HQ, N]
    held = top_mass(
        attention_weights(heads.q, heads.k)[0], block_size, n, heads.G if per_group else 1
    )
    first_query = n * block_size  # the first with more than n blocks
    return (
        held[:, first_query:].mean(-1) if first_query < held.shape[-1] else held.new_ones(len(held))
    )
