"""How an operator over a shared text is computed: by KV heads that are gathered, or with a halo.

`by_head` gathers a KV head while the one before is computed. `with_halo` gives each piece of this
rank the tokens just before it. Both hand a caller's function what one call of `ops` takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nsa_tutorial.training.many_gpus import cuts
from nsa_tutorial.training.many_gpus.apart import apart, together
from nsa_tutorial.training.many_gpus.cuts import Cut, Part
from nsa_tutorial.training.many_gpus.meshes import Context
from nsa_tutorial.training.many_gpus.travel import Gather, Halo, receive, send


@functools.lru_cache(maxsize=256)
def _offsets(values: tuple[int, ...], device: torch.device) -> Tensor:
    """`cu_seqlens` of a call; the same tensor each time, whose values are checked once."""
    return torch.tensor(values, dtype=torch.int32).to(device)


def cu_seqlens_of(part: Part, device: torch.device) -> Tensor | None:
    """The offsets of a call's documents, None for one document."""
    return None if part.cu_seqlens is None else _offsets(part.cu_seqlens, device)


def by_head(
    context: Context, cut: Cut, per_query: Sequence[Tensor | None], tokens: Sequence[Tensor],
    summaries: Sequence[Tensor], windows: tuple[int, int],
    run: Callable[[Part, list, list, list], tuple[Tensor, ...]],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gather one KV head after the other, and compute each with its group of query heads.

    Args:
        per_query: this rank's queries, gates and lists, `[B, n, heads, …]`.
        tokens, summaries: this rank's keys and values, `[B, n, H, …]`.
        windows: `length` and `stride` of the summaries.
        run: computes one call, from its part of these three, and returns `[B, n, heads, …]` each.

    Returns:
        What `run` returned, of all heads and this rank's queries.
    """
    parts = cut.parts_of(context.rank)
    sizes = [part.stop - part.start for part in parts]
    H = (*tokens, *summaries)[0].shape[2]
    per_query = [apart(x, H, sizes) for x in per_query]
    heads = [[x.unsqueeze(2) for x in of.unbind(2)] for of in (*summaries, *tokens)]
    spans_of_tokens = [(part.first, part.stop) for part in parts]
    spans_of_summaries = [cut.summaries_of(part, *windows) for part in parts] if summaries else []

    def start(h: int) -> list[tuple[Gather, Tensor]]:
        """Summaries first: a head begins with them."""
        begun, given = [], [head[h] for head in heads]
        for what, counts, spans, tensors in (
            ("summaries", _counts(cut, windows), spans_of_summaries, given[: len(summaries)]),
            ("keys and values", _counts(cut), spans_of_tokens, given[len(summaries) :]),
        ):
            if tensors:
                journey = Gather(cut, context.group, counts, spans, what)
                begun.append((journey, send(journey, *tensors)))
        return begun

    found, under_way = [], start(0)
    for h in range(H):
        here, under_way = under_way, start(h + 1) if h + 1 < H else []
        came = [x for journey, way in here for x in receive(journey, way)]
        for i, part in enumerate(parts):
            mine = [x[h][i] for x in per_query]
            of_part = came[i :: len(parts)]  # of each tensor, the rows of this part
            found.append(run(part, mine, of_part[len(summaries) :], of_part[: len(summaries)]))
    by_result = list(zip(*found, strict=True))
    each = len(parts)
    return tuple(
        together([of[h * each : (h + 1) * each] for h in range(H)], sizes) for of in by_result
    )


@functools.lru_cache(maxsize=64)
def _counts(cut: Cut, windows: tuple[int, int] | None = None) -> tuple[int, ...]:
    """Rows of each piece: tokens, or summaries."""
    return cut.tokens_of_pieces() if windows is None else cut.summaries_of_pieces(*windows)


def with_halo(
    context: Context, cut: Cut, tensors: Sequence[Tensor], starts: tuple[int, ...], what: str,
    pieces: Sequence[Sequence[Part]],
) -> list[tuple[Sequence[Part], list[Tensor], int]]:  # fmt: skip
    """For each piece of this rank its calls, its tensors with what comes just before, and the token
    with which these begin."""
    journey = Halo(cut, context.group, cuts.halos(cut, starts), what)
    came = receive(journey, send(journey, *tensors))
    own = cut.pieces(context.rank)
    return [(parts, list(came[i :: len(own)]), starts[own[i]]) for i, parts in enumerate(pieces)]
