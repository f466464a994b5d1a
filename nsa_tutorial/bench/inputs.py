"""The tensors of one operator and one shape: what `operators` run, and `problem` draws."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from nsa_tutorial.sparse.compression import num_summaries
from nsa_tutorial.sparse.selected_attention import QueryRows, block_list

Self = TypeVar("Self", bound="Inputs")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One call: batch 1, as many queries as keys, causal.

    Of the sizes that an operator does not have, `length`, `stride` and `window` are 0. For the
    window alone, `slots * block_size` keys are its size; to choose blocks, `slots` is how many.
    """

    tokens: int
    kv_heads: int
    group: int
    width: int
    value_width: int
    block_size: int
    slots: int
    dtype: str
    length: int = 0
    stride: int = 0
    window: int = 0

    @property
    def num_summaries(self) -> int:
        """Summaries of all tokens."""
        return num_summaries(self.tokens, self.length, self.stride)


@dataclass(frozen=True)
class Inputs:
    """The tensors of an operator and a shape.

    Attributes:
        operator: of `OPERATORS`.
        shape: the sizes.
        rows: where the query rows stand.
        tensors: by name, random and contiguous: the operator's inputs, and `d_…`, the gradients of
            its outputs.
        lists: how the lists were drawn, or the queries by which blocks are chosen
            (`drawing.DRIFTS`); empty where there is no choice.
        block_indices: the lists; None where there are none, or none yet.
        order: in which Triton walks the lists of `selected`, `"auto"` or of `order.ORDERS`.
    """

    operator: str
    shape: Shape
    rows: QueryRows
    tensors: dict[str, Tensor] = field(default_factory=dict)
    lists: str = ""
    block_indices: Tensor | None = None
    order: str = "auto"

    def with_tensors(self: Self, **tensors: Tensor) -> Self:
        """The same problem, with some tensors replaced."""
        return replace(self, tensors={**self.tensors, **tensors})

    @property
    def q(self) -> Tensor:
        """Queries `[1, tokens, heads, width]`."""
        return self.tensors["q"]

    @property
    def k(self) -> Tensor:
        """Keys."""
        return self.tensors["k"]

    @property
    def v(self) -> Tensor:
        """Values."""
        return self.tensors["v"]

    @property
    def d_o(self) -> Tensor:
        """The gradient of the output."""
        return self.tensors["d_o"]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.rows.position.device

    @property
    def window_size(self) -> int:
        """Keys of the window, all of them at most: without a size of its own, as many as lists
        would name."""
        s = self.shape
        return min(s.window or s.slots * s.block_size, s.tokens)

    @property
    def scale(self) -> float:
        """The factor on the scores."""
        return self.shape.width**-0.5

    @property
    def ids(self) -> Tensor:
        """The lists in the form that kernels walk, `[R, H, S]`."""
        return block_list(
            self.block_indices, self.rows, block_size=self.shape.block_size, block_counts=None,
            include_own_block=False,
        )  # fmt: skip
