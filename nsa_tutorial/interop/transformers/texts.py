"""Lists of blocks for texts that are packed into one row.

MiniMax-M3's indexer, as `transformers` 5.24 has it, counts blocks from the start of a row, and lets
a token look as far into the row as it is into its own text: of a later text it misses most keys,
whatever computes the attention. Here each text is handed to it by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Embeddings = tuple[Tensor, Tensor]


def choose_within_texts(model: nn.Module, on: bool = True) -> int:
    """Let the indexers of a model choose blocks for each text of a row by itself, so that packed
    texts give what each gives alone. It takes this package's attention, which reads such lists;
    `on=False` takes it back.

    Texts are told by `position_ids` that begin anew, in one row and without a cache: a later call
    of the model raises ValueError if there is one. Where positions go on, and in several rows, the
    indexers choose as before. The host waits for the device, to know where texts end.

    Returns:
        How many layers have an indexer.
    """
    indexers = [x.indexer for x in model.modules() if getattr(x, "indexer", None) is not None]
    for indexer in indexers:
        if on:
            indexer.forward = functools.partial(_choose, indexer)
        else:
            indexer.__dict__.pop("forward", None)
            indexer.__dict__.pop("cu_seqlens", None)
    return len(indexers)


def _choose(
    indexer: nn.Module, hidden_states: Tensor, position_embeddings: Embeddings, cache: object,
    position_ids: Tensor,
) -> Tensor:  # fmt: skip
    """`indexer.forward`, text by text; `indexer.cu_seqlens` says where they are, for the attention
    of the same layer."""
    forward: Callable[..., Tensor] = functools.partial(type(indexer).forward, indexer)
    N = hidden_states.shape[1]
    starts = [0]
    if len(hidden_states) == 1:
        starts += (position_ids[0].diff() != 1).nonzero().flatten().add(1).tolist()
    if len(starts) == 1:
        indexer.cu_seqlens = None
        return forward(hidden_states, position_embeddings, cache, position_ids)
    if cache is not None:
        raise ValueError(
            f"cache: got one beside position_ids that begin anew at {starts[1:]}, expected "
            "use_cache=False for packed texts"
        )
    lists = []
    for text in map(slice, starts, [*starts[1:], N]):
        turns = tuple(x[:, text] for x in position_embeddings)  # cosines and sines
        lists.append(forward(hidden_states[:, text], turns, None, position_ids[:, text]))
    most = max(x.shape[-1] for x in lists)
    device = hidden_states.device
    indexer.cu_seqlens = torch.tensor([*starts, N], dtype=torch.int32, device=device)
    return torch.cat([F.pad(x, (0, most - x.shape[-1]), value=-1) for x in lists], dim=2)
