"""Random inputs for NSA's branches, and what the contract says of them in loops over single
positions: the oracles, in fp64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from selection import assert_within_budget
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nsa_tutorial.sparse.selected_attention import masked_attention


@dataclass(frozen=True)
class Shape:
    """Sizes of one call; `make` draws queries, keys and values. `cu` packs sequences, and then
    `N == M`."""

    B: int = 1
    N: int = 37
    M: int = 37
    H: int = 2
    G: int = 3
    D: int = 24
    DV: int = 40
    length: int = 7
    stride: int = 3
    BS: int = 10
    window: int = 5
    cu: tuple[int, ...] | None = None
    magnitude: float = 1.0
    seed: int = 0

    def make(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
        g = torch.Generator().manual_seed(self.seed)
        q = torch.randn(self.B, self.N, self.H * self.G, self.D, generator=g) * self.magnitude
        k = torch.randn(self.B, self.M, self.H, self.D, generator=g)
        return (
            q.to(dtype),
            k.to(dtype),
            torch.randn(self.B, self.M, self.H, self.DV, generator=g).to(dtype),
        )

    @property
    def offsets(self) -> Tensor | None:
        return None if self.cu is None else torch.tensor(self.cu, dtype=torch.int32)

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """Where each sequence begins and ends."""
        return list(pairwise((0, self.M) if self.cu is None else self.cu))

    def queries(self) -> Iterator[tuple[int, int, int]]:
        """Of each query: its row, which sequence it is in, and its position there."""
        for n in range(self.N):
            token = self.M - self.N + n
            for s, (start, end) in enumerate(self.bounds):
                if start <= token < end:
                    yield n, s, token - start

    def summaries(self) -> list[tuple[int, int]]:
        """Of each summary: its sequence, and the token of that sequence with which it begins."""
        return [
            (s, first)
            for s, (start, end) in enumerate(self.bounds)
            for first in range(0, end - start, self.stride)
            if first + self.length <= end - start
        ]

    def seen_summaries(self) -> Tensor:
        """bool `[N, M_c]`: those of the query's sequence that end by its position."""
        summaries = self.summaries()
        mask = torch.zeros(self.N, len(summaries), dtype=torch.bool)
        for n, s, position in self.queries():
            for j, (of, first) in enumerate(summaries):
                mask[n, j] = of == s and first + self.length - 1 <= position
        return mask

    def seen_keys(self, window: int) -> Tensor:
        """bool `[N, M]`: the last `window` keys of the query's sequence, up to itself."""
        mask = torch.zeros(self.N, self.M, dtype=torch.bool)
        for n, s, position in self.queries():
            start = self.bounds[s][0]
            for p in range(position + 1):
                mask[n, start + p] = p > position - window
        return mask

    def over_heads(self, mask: Tensor) -> Tensor:
        """`[N, J]` to the `[B, N, H, J]` of `masked_attention`."""
        return mask[None, :, None].expand(self.B, -1, self.H, -1)


def assert_attention(
    o: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float | None = None,
) -> None:
    """`o` and `lse` are those of attention under `mask`, to the contract's error budget."""
    o_true, lse_true = masked_attention(q.double(), k.double(), v.double(), mask, scale)
    o_plain, lse_plain = masked_attention(q, k, v, mask, scale)
    assert o.dtype == v.dtype
    assert lse.dtype == torch.promote_types(q.dtype, torch.float32)
    assert_within_budget(o, o_true, o_plain, "o")
    assert_within_budget(lse, lse_true, lse_plain, "lse")


def select_loop(
    shape: Shape,
    q: Tensor,
    k_cmp: Tensor,
    *,
    top_n: int,
    num_initial: int,
    num_local: int,
    counts: Tensor | None = None,
) -> list[list[list[list[int]]]]:
    """The blocks of every row `[b][n][h]`, one query at a time, one token at a time;
    `counts [B, N, H]` cut each row's."""
    summaries, seen = shape.summaries(), shape.seen_summaries()
    G, BS = shape.G, shape.BS
    chosen = [[[[] for _ in range(shape.H)] for _ in range(shape.N)] for _ in range(shape.B)]
    for b in range(shape.B):
        for n, _, position in shape.queries():
            own = position // BS
            visible = seen[n].nonzero().flatten().tolist()
            for h in range(shape.H):
                score = [0.0] * (own + 1)
                for g in range(h * G, h * G + G):
                    p = torch.softmax(k_cmp[b, visible, h] @ q[b, n, g] * shape.D**-0.5, 0).tolist()
                    for j, mass in zip(visible, p, strict=True):
                        for token in range(summaries[j][1], summaries[j][1] + shape.length):
                            if token // BS <= own:
                                score[token // BS] += mass / shape.stride
                forced = {i for i in range(own + 1) if i < num_initial or i > own - num_local}
                free = sorted(
                    (i for i in range(own + 1) if i not in forced),
                    key=lambda i: (-round(score[i], 9), i),
                )
                ranked = [*sorted(forced), *free][:top_n]
                best = sorted(ranked if counts is None else ranked[: int(counts[b, n, h])])
                chosen[b][n][h] = best + [-1] * (top_n - len(best))
    return chosen


def finite(x: Tensor) -> Tensor:
    """`-inf` as 0, so that a log-sum-exp can be added up."""
    return x.masked_fill(x == -torch.inf, 0)


def assert_blind_to(
    call: Callable[..., tuple[Tensor, ...]],
    tensors: list[Tensor],
    spoil: list[tuple[int, slice]],
    rows: slice,
) -> None:
    """What `call(*tensors)` gives for the queries `rows` stays the same to the bit with NaN in
    `spoil`, and with other numbers.

    With other numbers, so do the gradients. With NaN, those of the queries that see it are NaN,
    also where nobody asks for their output: 0 * NaN.

    Args:
        call: returns tensors `[B, N, ...]`.
        tensors: floating-point inputs.
        spoil: which of them, and which positions, change.
        rows: the queries that must not notice.
    """
    results = []
    for change in (0.0, 5.0, torch.nan):
        inputs = [x.clone() for x in tensors]
        for i, positions in spoil:
            inputs[i][:, positions] += change
        inputs = [x.requires_grad_() for x in inputs]
        outputs = [x[:, rows] for x in call(*inputs)]
        sum(finite(x).sum() for x in outputs).backward()
        results.append((outputs, [x.grad for x in inputs]))
    (outputs, gradients), (outputs_5, gradients_5), (outputs_nan, _) = results
    assert all(
        torch.equal(a, b) for a, b in zip(outputs + gradients, outputs_5 + gradients_5, strict=True)
    )
    assert all(torch.equal(a, b) for a, b in zip(outputs, outputs_nan, strict=True))


class LargestStorage(TorchDispatchMode):
    """While it is on, `bytes` is the size of the largest tensor that any operation returned."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out
