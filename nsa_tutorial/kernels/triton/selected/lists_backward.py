"""What the backward of lists shares in all orders: the call, and the chunks in which the gradients
of keys and values are added up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_tutorial.kernels.tables import chunks
from nsa_tutorial.kernels.triton.backward_call import BackwardCall
from nsa_tutorial.kernels.triton.selected import backward
from nsa_tutorial.kernels.triton.tables import tables_of_lists
from nsa_tutorial.runtime.rounding import cdiv

SUM_KEYS = 16  # keys whose shares a program adds


@dataclass(frozen=True, kw_only=True)
class ListsCall(BackwardCall):
    """One backward of lists, with the forward's `ids`, `block_size` and `slot_scale`."""

    ids: Tensor
    block_size: int
    slot_scale: Tensor | None = None

    @property
    def block_sizes(self) -> dict[str, int]:
        """The kernels' `G, D, DV, BS`."""
        return self.sizes | {"BS": self.block_size}


class KeyChunks(NamedTuple):
    """Attributes:
    tables: which queries each chunk of the inverse list holds.
    BT, parts: keys of a program, and programs of a block.
    shares: fp32 room for the shares of blocks that are cut, `[keys, DT]` and `[keys, DVT]`.
    """

    tables: chunks.Tables
    BT: int
    parts: int
    shares: list[Tensor]

    @property
    def grid(self) -> tuple[int, int]:
        """A program for each part of each chunk."""
        return len(self.tables.chunks.first), self.parts


def key_chunks(call: ListsCall, BT: int) -> KeyChunks:
    """The chunks for programs of `BT` keys."""
    c, (B, M), widths = call, call.k.shape[:2], call.widths
    parts = cdiv(c.block_size, BT)
    tables = tables_of_lists(
        c.ids, c.rows, c.lse2, block_size=c.block_size, num_keys=B * M,
        share_bytes=4 * parts * BT * sum(widths.values()), itemsize=c.q.element_size(),
        slot_scale=c.slot_scale,
    )  # fmt: skip
    places = tables.chunks.num_places * parts * BT
    shares = [c.q.new_empty(places, width, dtype=torch.float32) for width in widths.values()]
    return KeyChunks(tables, BT, parts, shares)


def add_shares(call: ListsCall, cut: KeyChunks, d_k: Tensor, d_v: Tensor) -> None:
    """Write the gradients of the keys and values of blocks that were cut: the sums of the chunks'
    shares, in a fixed order."""
    c, tables, shares = call, cut.tables, cut.shares
    (B, M, H), walked = c.k.shape[:3], tables.chunks
    if walked.num_places:
        backward.sum_kernel[(len(walked.first), cdiv(c.block_size, SUM_KEYS))](
            *shares, tables.rows, tables.row_end, walked.first_key, walked.head, walked.last,
            walked.part, walked.num_parts, walked.place, d_k, d_v, H, B * M, D=c.sizes["D"],
            DV=c.sizes["DV"], BS=c.block_size, **c.widths, BT=cut.BT, BK=SUM_KEYS,
        )  # fmt: skip
