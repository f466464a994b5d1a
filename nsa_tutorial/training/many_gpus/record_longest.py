"""The longest text whose forward and backward fit into memory, on one GPU and over all.

On one GPU the length doubles until memory is full, and then a bisection finds the limit. Over all,
a rank that runs out of memory leaves the others waiting in a kernel. So the length rises in small
steps until one does not fit, and that is the last thing that these processes do.
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

# of as many times the longest text of one GPU as there are
RISE = (0.8, 0.88, 0.92, 0.96, 1.0, 1.03, 1.06, 1.1)
GRAIN = 4096  # tokens to which lengths are rounded


def longest(
    context: meshes.Context, mesh: meshes.Mesh, shape: Shape, tokens: int
) -> Iterator[dict]:
    """Attempts, one a row: `gpus`, `tokens`, whether it `fits`, GiB at the most, and seconds. Only
    on CUDA, where memory has an end."""
    if not torch.cuda.is_available():
        return
    rows = on_each(context, (lambda: list(on_one(shape, tokens))) if context.rank == 0 else None)[0]
    yield from rows
    most = max((row["tokens"] for row in rows if row["fits"]), default=0)
    for factor in RISE if most else ():
        length, start = int(most * context.ranks * factor) // GRAIN * GRAIN, time.perf_counter()
        row = attempt(shape, length, mesh, Cut(context.ranks, length))
        try:
            everyone = on_each(context, lambda row=row: row)
        except RuntimeError:  # the others are elsewhere
            everyone = [row | {"fits": False}]
        row["fits"] = all(each["fits"] for each in everyone)
        row["gib"] = max(each["gib"] for each in everyone)
        if row["fits"]:
            torch.cuda.synchronize()
            row["seconds"] = round(time.perf_counter() - start, 2)
        yield {"kind": "longest", "gpus": context.ranks, "cut": "zigzag"} | row
        if not row["fits"]:
            return


def on_one(shape: Shape, tokens: int) -> Iterator[dict]:
    """Double, then bisect to a sixteenth."""
    fits, too_long = 0, None
    while too_long is None or too_long - fits > max(fits // 16, GRAIN):
        row = attempt(shape, tokens)
        yield {"kind": "longest", "gpus": 1, "cut": None} | row
        fits, too_long = (tokens, too_long) if row["fits"] else (fits, tokens)
        tokens = 2 * fits if too_long is None else (fits + too_long) // 2 // GRAIN * GRAIN


def attempt(
    shape: Shape, tokens: int, mesh: meshes.Mesh | None = None, cut: Cut | None = None
) -> dict:
    """One forward and backward. Where it does not fit, nothing is waited for."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    start, fits = time.perf_counter(), True
    try:
        step = Step.random(shape, "cuda", tokens, mesh, cut)
        step.backward(step.forward())
        if mesh is None:
            torch.cuda.synchronize()
    except (torch.OutOfMemoryError, RankLost):
        fits = False
    gib = torch.cuda.max_memory_allocated() / 2**30
    seconds = time.perf_counter() - start
    return {"tokens": tokens, "fits": fits, "gib": round(gib, 2), "seconds": round(seconds, 2)}
