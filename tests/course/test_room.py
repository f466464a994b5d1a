"""A reader's kernel that misses its tensors by a little gets a verdict, and harms nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch import Tensor

from nsa_tutorial.course.exercises import Exercise
from nsa_tutorial.course.judging import judge
from nsa_tutorial.course.room import ROOM, roomy
from nsa_tutorial.runtime import environment

here = environment.detect()
needs_triton = pytest.mark.skipif(
    here.why_not("triton", here.device) is not None, reason="Triton does not run here"
)
# chapter, exercise, and which argument of the kernel is its output
KERNELS = (
    ("start_here", "add", 2),
    ("start_here", "row_max", 1),
    ("dense_attention", "causal_softmax", 1),
    ("grouped_query_attention", "score_group", 2),
    ("online_softmax", "row_lse", 1),
    ("tiled_attention", "tile_maximum", 2),
    ("compression", "window_means", 1),
    ("selected_attention", "sum_of_list", 2),
    ("block_selection", "block_sums", 2),
    ("two_tile_languages", "row_variance", 1),
    ("two_tile_languages", "tile_product", 2),
    ("triton_forward", "first_scores", 2),
    ("selection_kernels", "group_mass", 3),
    ("performance", "walk_step", 3),
)
of_each_kernel = pytest.mark.parametrize(
    ("chapter", "name", "output"), KERNELS, ids=[name for _, name, _ in KERNELS]
)


def exercise_of(chapter: str, name: str) -> Exercise:
    exercises = import_module(f"nsa_tutorial.course.exercises.{chapter}").EXERCISES
    return next(e for e in exercises if e.name == name)


class Launched:
    """A kernel whose arguments go through `change` first; launched like a kernel."""

    def __init__(self, kernel: object, change: Callable[[list], list]) -> None:
        self.kernel, self.change, self.fn, self.run = kernel, change, kernel.fn, None

    def __getitem__(self, grid: tuple) -> Callable:
        return lambda *args, **sizes: self.kernel[grid](*self.change(list(args)), **sizes)


def room_of(x: Tensor) -> int:
    """How many numbers lie before a tensor, or behind it, in its own memory: the smaller number."""
    whole = x.untyped_storage().nbytes() // x.element_size()
    return min(x.storage_offset(), whole - x.storage_offset() - x.numel())


@pytest.mark.parametrize("x", [torch.arange(6).view(2, 3), torch.rand(4, 3).T, torch.rand(0)])
def test_a_tensor_with_room_is_a_copy(x: Tensor) -> None:
    copy = roomy(x, -7)
    assert copy.is_contiguous() and copy.dtype == x.dtype and torch.equal(copy.cpu(), x)
    assert room_of(copy) == ROOM
    memory = copy.as_strided((2 * ROOM + x.numel(),), (1,), 0)
    assert (memory == -7).sum() == 2 * ROOM
    copy.fill_(9)
    assert not (x == 9).any()


@needs_triton
@of_each_kernel
def test_a_reader_s_kernel_gets_tensors_with_room(chapter: str, name: str, output: int) -> None:
    exercise, rooms = exercise_of(chapter, name), []

    def looked_at(args: list) -> list:
        rooms.extend(room_of(x) for x in args if isinstance(x, Tensor))
        return args

    exercise.run(lambda: Launched(exercise.solution(), looked_at), *exercise.cases[0].arguments())
    assert len(rooms) > output and min(rooms) >= ROOM


@needs_triton
@of_each_kernel
@pytest.mark.parametrize("by", [50, -50], ids=["past the end", "before the start"])
def test_storing_somewhere_else_gets_a_verdict(
    chapter: str, name: str, output: int, by: int
) -> None:
    """The kernel is given its output's place in memory, moved; where no memory lies, PyTorch
    refuses to move it, and nothing is launched."""
    # that something is wrong is enough here: which mistake it looks like takes as long for each
    exercise, launched = replace(exercise_of(chapter, name), misconceptions=()), []

    def moved(args: list) -> list:
        y = args[output]
        args[output] = y.as_strided(y.shape, y.stride(), y.storage_offset() + by)
        launched.append(by)
        return args

    verdict = judge(exercise, lambda: Launched(exercise.solution(), moved))
    assert launched and verdict.outcome == "wrong", verdict.text
