"""Triton's attention to summaries with one decision of a launch changed at a time: rows that
`--steps` adds to the benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest.mock import patch

import torch
from torch import Tensor

from nsa_tutorial.bench.problem import Problem
from nsa_tutorial.sparse.compression import summary_rows

# two sides of the tiles, warps, stages
FORWARD = ((128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 2), (64, 32, 4, 3))
QUERIES = ((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2))
SUMMARIES = ((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 3))


def _name(tiles: tuple[int, int, int, int]) -> str:
    return "{} by {}, {} warps, {} stages".format(*tiles)


def _options(tiles: tuple[int, int, int, int], sides: tuple[str, str]) -> Callable[..., dict]:
    chosen = dict(zip((*sides, "num_warps", "num_stages"), tiles, strict=True))
    return lambda *_: chosen


def forward_steps(problem: Problem) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Pointers in place of descriptors, and other tiles."""
    from nsa_tutorial.kernels.triton.compressed import launch

    def changed(tiles: tuple[int, int, int, int], **functions: object) -> Callable[[], Tensor]:
        functions["attend_options"] = _options(tiles, ("BQ", "BT"))

        def call() -> Tensor:
            with patch.multiple(launch, **functions):
                return problem.run("triton")[0]

        return call

    for tiles in FORWARD:
        yield f"descriptors, {_name(tiles)}", changed(tiles)
        never = changed(tiles, can_use_descriptors=lambda *_: False)
        yield f"pointers, {_name(tiles)}", never


def backward_steps(problem: Problem) -> Iterator[tuple[str, Callable[[], tuple[Tensor, ...]]]]:
    """Other tiles of the queries' kernel, and of the summaries'."""
    from nsa_tutorial.kernels.triton.compressed import launch

    shape = problem.shape
    sizes = {"length": shape.length, "stride": shape.stride, "cu_seqlens": None}
    rows = summary_rows(problem.rows, shape.tokens, **sizes)
    o, lse = (x.detach() for x in problem.run("triton"))
    saved = (problem.q, problem.tensors["k_cmp"], problem.tensors["v_cmp"], o, lse)
    saved = (problem.d_o, torch.zeros_like(lse), *(x.detach() for x in saved))

    def changed(name: str, options: Callable[..., dict]) -> Callable[[], tuple[Tensor, ...]]:
        def call() -> tuple[Tensor, ...]:
            with patch.object(launch, name, options):
                return launch.compressed_backward(*saved, rows, scale=problem.scale)

        return call

    for tiles in QUERIES:
        options = _options(tiles, ("BQ", "BT"))
        yield f"queries {_name(tiles)}", changed("summary_dq_options", options)
    for tiles in SUMMARIES:
        options = _options(tiles, ("BT", "BR"))
        yield f"summaries {_name(tiles)}", changed("summary_dkv_options", options)
