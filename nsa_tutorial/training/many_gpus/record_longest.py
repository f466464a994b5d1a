"""The longest text whose forward and backward fit into memory, on one GPU and over all.

Memory grows in proportion to the length. So one attempt tells about how long the longest text is,
and from just below there the length rises in small steps until one does not fit. Over several GPUs
that is the last thing that their processes do: a rank that runs out of memory leaves the others
waiting in a kernel.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import torch

from nsa_tutorial.training.many_gpus import meshes
from nsa_tutorial.training.many_gpus.collectives import RankLost
from nsa_tutorial.training.many_gpus.cuts import Cut
from nsa_tutorial.training.many_gpus.record_step import Shape, Step, on_each

RISE = (0.94, 0.98, 1.02, 1.06)  # of the length that the first attempt tells
GRAIN = 4096  # tokens to which lengths are rounded


def longest(
    context: meshes.Context, mesh: meshes.Mesh, shape: Shape, tokens: int
) -> Iterator[dict]:
    """Attempts, one a row: `gpus`, `tokens`, whether it `fits`, GiB at the most, the GiB that there
    were, and seconds. Only on CUDA, where memory has an end."""
    if not torch.cuda.is_available():
        return
    on_one = (lambda: list(climb(shape, tokens))) if context.rank == 0 else None
    yield from on_each(context, on_one)[0]
    yield from climb(shape, tokens, context, mesh)


def climb(
    shape: Shape, tokens: int, context: meshes.Context | None = None,
    mesh: meshes.Mesh | None = None,
) -> Iterator[dict]:  # fmt: skip
    """Rising lengths until one does not fit; `tokens` is the first."""
    facts = {"kind": "longest", "gpus": context.ranks if mesh else 1,
             "cut": "zigzag" if mesh else None}  # fmt: skip
    lengths = [tokens]
    while lengths:
        length, start = lengths.pop(0), time.perf_counter()
        row = attempt(shape, length, mesh, Cut(context.ranks, length) if mesh else None)
        if mesh:
            row = agreed(context, row)
        if row["fits"]:
            torch.cuda.synchronize()
        yield facts | row | {"seconds": round(time.perf_counter() - start, 2)}
        if not row["fits"]:
            return
        if length == tokens:
            reach = tokens * row["room"] / max(row["gib"], 1e-3)
            lengths = [max(1, int(reach * factor) // GRAIN) * GRAIN for factor in RISE]


def agreed(context: meshes.Context, row: dict) -> dict:
    """What is so on all ranks. Nothing waits for a GPU."""
    try:
        everyone = on_each(context, lambda: row)
    except RuntimeError:  # the others are elsewhere
        return row | {"fits": False}
    return row | {
        "fits": all(each["fits"] for each in everyone),
        "gib": max(each["gib"] for each in everyone),
        "room": min(each["room"] for each in everyone),
    }


def attempt(
    shape: Shape, tokens: int, mesh: meshes.Mesh | None = None, cut: Cut | None = None
) -> dict:
    """One forward and backward. Where it does not fit, nothing is waited for."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    room = torch.cuda.mem_get_info()[0] / 2**30
    try:
        step = Step.random(shape, "cuda", tokens, mesh, cut)
        step.backward(step.forward())
        if mesh is None:
            torch.cuda.synchronize()
        fits = True
    except (torch.OutOfMemoryError, RankLost):
        fits = False
    gib = torch.cuda.max_memory_allocated() / 2**30
    return {"tokens": tokens, "fits": fits, "gib": round(gib, 2), "room": round(room, 2)}
