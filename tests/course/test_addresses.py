"""A kernel that would leave its tensors is stopped before it does, with a sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nsa_tutorial.course import addresses
from nsa_tutorial.course.addresses import WildPointer, noting_strays
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.room import roomy
from nsa_tutorial.runtime import environment

needs_the_interpreter = pytest.mark.skipif(
    environment.detect().device != "cpu" or environment.detect().why_not("triton") is not None,
    reason="Triton does not interpret kernels here",
)
pytestmark = [needs_the_interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
FAR = 2**40  # numbers: no memory lies there

# what chapter 09's reader wrote: K and M are too many in the rows of B
TILE_PRODUCT = """
import torch
from nsa_tutorial.course.attempts import call
from nsa_tutorial.course.exercises import two_tile_languages
from nsa_tutorial.course.languages import tl, triton

@triton.jit
def kernel(A, B, C, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros([BM, BN], tl.float32)
    for step in tl.range(tl.cdiv(K, BD)):
        depth = step * BD + tl.arange(0, BD)
        a_tile = tl.load(A + rows[:, None] * K + depth, mask=(rows < M)[:, None] & (depth < K))
        pointers = B + depth[:, None] * N * K * M + columns
        b_tile = tl.load(pointers, mask=(depth < K)[:, None] & (columns < N), other=0.0)
        acc = tl.dot(a_tile, b_tile, acc)
    c_mask = (rows < M)[:, None] & (columns < N)
    tl.store(C + rows[:, None] * N + columns, acc, mask=c_mask)

x = torch.zeros(300, 300)
try:
    kernel[(19, 19)](x, x.clone(), x.clone(), 300, 300, 300, 16, 16, 16)
except IndexError as error:
    print(*error._render_traceback_())
(exercise,) = [e for e in two_tile_languages.EXERCISES if e.name == "tile_product"]
print(call(exercise, lambda: kernel, exercise.cases[0]).kind)
"""


def test_a_pointer_that_misses_by_far_leaves_python_alive(tmp_path: Path) -> None:
    """In a cell and in a case of an exercise; without care, the process ends here (SIGSEGV)."""
    cell = tmp_path / "cell.py"
    cell.write_text(TILE_PRODUCT)
    done = subprocess.run([sys.executable, cell], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "WildPointer: Program (0, 0, 0) of `kernel` would load element 27,000,000 of `B`, which "
        "has 90,000 (shape [300, 300]) in this line:\n    b_tile = tl.load(pointers, "
    )
    assert done.stdout.endswith("\nWildPointer\n")


def kernels():
    """One for each way to touch memory; each begins `by` numbers from its tensor's start."""

    @triton.jit
    def load(x, y, by):
        tl.store(y, tl.load(x + by))

    @triton.jit
    def store(x, y, by):
        tl.store(x + by + tl.arange(0, 2), tl.load(y + tl.arange(0, 2)))

    @triton.jit
    def atomic_add(x, y, by):
        tl.atomic_add(x + by, tl.load(y))

    @triton.jit
    def atomic_cas(x, y, by):
        tl.atomic_cas(x + by, 0, 1)

    return {f.fn.__name__: f for f in (load, store, atomic_add, atomic_cas)}


@pytest.mark.parametrize("by", [FAR, -1], ids=["far", "just before"])
@pytest.mark.parametrize("name", ["load", "store", "atomic_add", "atomic_cas"])
def test_every_way_to_touch_memory(name: str, by: int) -> None:
    x, y = torch.zeros(4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(WildPointer, match=rf"Program \(0, 0, 0\) of `{name}` would"):
        kernels()[name][(1,)](x, y, by)
    kernels()[name][(1,)](x, y, 1)  # and another launch runs


def test_what_is_masked_or_in_the_same_memory_may_be_anywhere() -> None:
    @triton.jit
    def copy(x, y, by, n):
        at = tl.arange(0, 4)
        tl.store(y + at, tl.load(x + at * by, mask=at < n, other=7), mask=at < 4)

    memory, y = torch.arange(8), torch.zeros(4, dtype=torch.int64)
    copy[(1,)](memory[4:6], y, FAR, 1)
    assert y.tolist() == [4, 7, 7, 7]
    copy[(1,)](memory[4:6], y, 1, 4)  # past the end of the two, not of their memory
    assert y.tolist() == [4, 5, 6, 7]
    copy[(1,)](memory[:0], y, FAR, 0)
    assert y.tolist() == [7, 7, 7, 7]
    with pytest.raises(WildPointer, match=r"element 2,147,483,648 of `x`, which has 2 "):
        copy[(1,)](memory[4:6], y, FAR // 512, 2)


def test_the_first_load_from_the_room_around_a_tensor_is_kept_in_mind() -> None:
    """If no mask hides it; a store there is another matter, which results show."""

    @triton.jit
    def copy(x, y, n, m):
        at = tl.arange(0, 8)
        tl.store(y + at, tl.load(x + at, mask=at < n, other=7.0), mask=at < m)

    x, y = roomy(torch.arange(4.0), 9.0), roomy(torch.zeros(4), -77.0)
    with noting_strays() as strays:
        copy[(1,)](x, y, 4, 8)
        copy[(1,)](x, torch.zeros(8), 4, 8)
    assert strays == []
    with noting_strays() as strays:
        copy[(1,)](x, y, 5, 4)
        copy[(1,)](x, y, 8, 4)
    (told,) = strays
    assert told.startswith(
        "Program (0, 0, 0) of `copy` loads element 4 of `x`, which has 4 (shape [4]) in this line:"
    )
    assert y.tolist() == [0, 1, 2, 3]
    copy[(1,)](x, y, 8, 4)  # nobody asks
    assert len(strays) == 1


def test_a_pointer_of_two_tensors_names_all_of_them() -> None:
    """An address says nothing of the tensor that it was counted from."""

    @triton.jit
    def pick(x, y, is_first):
        pointer = x
        if is_first == 0:
            pointer = y
        tl.store(pointer + 99, 1.0)

    with pytest.raises(WildPointer, match=r"none of its tensors has \(`x` \[2\], `y` \[3\]\)"):
        pick[(1,)](torch.zeros(2), torch.zeros(3), 0)


def test_a_tensor_in_a_tuple_and_one_given_by_name_are_tensors_of_the_launch() -> None:
    @triton.jit
    def add(pair, y):
        tl.store(y, tl.load(pair[0]) + tl.load(pair[1]))

    y = torch.zeros(1)
    add[(1,)]((torch.ones(1), torch.ones(1)), y=y)
    assert y.item() == 2


def test_watching_twice_is_watching_once() -> None:
    from triton.runtime import interpreter

    before = interpreter.InterpreterBuilder.create_masked_load
    addresses.watch()
    assert interpreter.InterpreterBuilder.create_masked_load is before
