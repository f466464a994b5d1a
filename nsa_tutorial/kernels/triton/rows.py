"""Where the query rows of a batch stand, in one launch: what `selected_attention.query_rows`,
`compression.summary_rows` and `compression.summaries_of_tokens` make of twenty small operations of
PyTorch's. On a short text their launches cost more than the attention.

Symbols: `R = B * N` query rows · `M` keys and `M_c` summaries of a sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_tutorial.runtime.rounding import cdiv
from nsa_tutorial.sparse.compression import num_summaries
from nsa_tutorial.sparse.selected_attention import QueryRows

BLOCK = 1024  # rows or tokens of a program


class Located(NamedTuple):
    """int32 tensors.

    Attributes:
        of_rows: `[5, R]`: the first key, the number of visible keys, and the position of each row;
            its first summary, and the number of visible ones.
        of_tokens: `[2, B * M]`: a token lies in the summaries from the first number to before the
            second.
        first: `[B * M_c]`, the token with which each summary begins.
        num_sequences: at most.
    """

    of_rows: Tensor
    of_tokens: Tensor
    first: Tensor
    num_sequences: int

    @property
    def rows(self) -> QueryRows:
        """The query rows among the keys."""
        return QueryRows(*self.of_rows[:3].unbind(), self.num_sequences)

    @property
    def summary_rows(self) -> QueryRows:
        """The query rows among the summaries."""
        _, _, position, first, num_visible = self.of_rows.unbind()
        return QueryRows(first, num_visible, position, self.num_sequences)


@triton.jit(do_not_specialize=["R", "N", "M", "M_c", "num_tokens"])  # new lengths, same kernel
def locate_kernel(
    OfRows, OfTokens, First, R, N, M, M_c, num_tokens, length, stride, BLOCK: tl.constexpr
):
    """Writes `OfRows [5, R]`, `OfTokens [2, num_tokens]` and `First [num_tokens // M * M_c]`, all
    int32. The grid is `(cdiv(max(R, num_tokens), BLOCK),)`."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)

    # -- query rows --
    sequence = index // N
    position = index - sequence * N + M - N
    seen = tl.maximum(position + 1 - length, -stride) // stride + 1  # -stride: no window ends yet
    seen = tl.where(position + 1 < length, 0, seen)
    columns = (sequence * M, position + 1, position, sequence * M_c, seen)
    for i in tl.static_range(5):
        tl.store(OfRows + i * R + index, columns[i], mask=index < R)

    # -- tokens --
    sequence = index // M
    token = index - sequence * M
    begin = tl.where(token < length, 0, (token - length) // stride + 1)
    end = tl.minimum(token // stride + 1, M_c)
    begin = tl.minimum(begin, end)
    tl.store(OfTokens + index, sequence * M_c + begin, mask=index < num_tokens)
    tl.store(OfTokens + num_tokens + index, sequence * M_c + end, mask=index < num_tokens)

    # -- summaries --
    sequence = index // tl.maximum(M_c, 1)
    summary = index - sequence * M_c
    in_summaries = index < num_tokens // M * M_c
    tl.store(First + index, sequence * M + summary * stride, mask=in_summaries)


def locate(
    B: int, N: int, M: int, *, length: int, stride: int, device: torch.device
) -> Located:  # fmt: skip
    """The rows of `B` sequences: `N` queries, the last of `M` positions, causal; and their
    summaries."""
    R, tokens, M_c = B * N, B * M, num_summaries(M, length, stride)
    of_rows = torch.empty(5, R, dtype=torch.int32, device=device)
    of_tokens = torch.empty(2, tokens, dtype=torch.int32, device=device)
    first = torch.empty(B * M_c, dtype=torch.int32, device=device)
    locate_kernel[(cdiv(max(R, tokens), BLOCK),)](
        of_rows, of_tokens, first, R, N, M, M_c, tokens, length, stride, BLOCK=BLOCK
    )
    return Located(of_rows, of_tokens, first, B)
