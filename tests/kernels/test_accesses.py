"""Every Triton kernel stays inside its tensors, and no program touches what another one stores.

`pytest --accesses` watches all other tests in the same way."""

from __future__ import annotations

import contextlib

import pytest
import torch
from accesses import assert_sound
from places import skip_unless_runs
from selection import Problem

from nsa_tutorial import ops
from nsa_tutorial.course.accesses import Accesses
from nsa_tutorial.course.watching import watch, watching
from nsa_tutorial.runtime import environment
from nsa_tutorial.runtime.order import ORDERS

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(environment.detect().triton is None, reason="triton is not installed"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, in the interpreter
]

PROBLEMS = {
    "own block, ragged tail": Problem(N=5, M=37, H=1, D=16, DV=24, own=True, counts="random"),
    "packed, one empty": Problem(N=12, M=12, G=1, BS=8, cu=(0, 2, 2, 11, 12), D=16, DV=16),
    "blocks of 24, not causal": Problem(N=5, M=37, H=1, G=16, BS=24, D=16, DV=16, causal=False),
}


def alone(x: torch.Tensor) -> torch.Tensor:
    """A copy with room on both sides: an access next to it is in no other tensor."""
    room = 4096
    copy = x.new_empty(x.numel() + 2 * room)[room:-room].view(x.shape)
    return copy.copy_(x).requires_grad_(x.is_floating_point())


def watched(run, *inputs: torch.Tensor) -> Accesses:
    inputs = [alone(x) for x in inputs]
    with watching() as seen:
        run(*inputs).float().sum().backward()
    return seen


@pytest.mark.parametrize(
    ("problem", "order"),
    [
        pytest.param(
            problem, order, id=f"{name}-{order}",
            marks=[] if i % len(ORDERS) == j else pytest.mark.exhaustive,
        )
        for i, (name, problem) in enumerate(PROBLEMS.items())
        for j, order in enumerate(ORDERS)
    ],
)  # fmt: skip
def test_lists_in_each_order(problem: Problem, order: str) -> None:
    skip_unless_runs("triton", "cpu")
    call = problem.make()
    seen = watched(lambda q, k, v: call.having(q=q, k=k, v=v).run(order)[0], call.q, call.k, call.v)
    assert_sound(seen)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "cu", [pytest.param(None, id="batch", marks=pytest.mark.exhaustive), (0, 3, 3, 14, 19)], ids=str
)
def test_all_of_nsa(cu: tuple[int, ...] | None) -> None:
    """Pooling, attention to summaries, the choice, lists, windows and gates, and back."""
    skip_unless_runs("triton", "cpu")
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 19, heads, 16, generator=g) for heads in (4, 2, 2))
    gates = [torch.rand(1, 19, 4, generator=g) for _ in range(3)]
    options = {
        "block_counts": 3, "block_size": 4, "window_size": 5, "length": 4, "stride": 2,
        "cu_seqlens": None if cu is None else torch.tensor(cu, dtype=torch.int32),
    }  # fmt: skip
    seen = watched(
        lambda *x: ops.native_sparse_attention(*x, **options, backend="triton"), q, k, v, *gates
    )
    assert_sound(seen)


def launch(kernel, *arguments, grid: int = 2) -> Accesses:
    # where the course watches addresses, it stops a kernel at the first that is outside
    with watching() as seen, contextlib.suppress(IndexError):
        kernel[(grid,)](*arguments)
    return seen


def planted():
    """Kernels with one fault each, and what is said of it."""
    import triton
    import triton.language as tl

    @triton.jit
    def past_the_end(x, y):
        tl.store(y + tl.program_id(0), tl.load(x + tl.program_id(0) + 3))

    @triton.jit
    def in_a_gap(x, y):
        tl.store(y + tl.program_id(0), tl.load(x + 1))

    @triton.jit
    def same_store(x, y):
        tl.store(y, tl.load(x + tl.program_id(0)))

    @triton.jit
    def reads_a_neighbour(x, y):
        tl.store(y + tl.program_id(0), tl.load(y + 1 - tl.program_id(0)))

    @triton.jit
    def adds_where_one_stores(x, y):
        if tl.program_id(0) == 0:
            tl.store(y, 1.0)
        else:
            tl.atomic_add(y, 1.0)

    @triton.jit
    def two_lanes(x, y):
        lane = tl.arange(0, 4)
        tl.store(y + 4 * tl.program_id(0) + lane // 2, lane.to(tl.float32))

    @triton.jit
    def adds(x, y):
        tl.atomic_add(y, tl.load(x + tl.program_id(0)))

    return {
        "past the end": (past_the_end, "loads 1 element outside of all its arguments"),
        "in a gap": (in_a_gap, "loads 1 element outside of all its arguments"),
        "same store": (same_store, "stores 1 element of `y` where program 0 stores"),
        "reads a neighbour": (reads_a_neighbour, "where program 0"),
        "adds where one stores": (adds_where_one_stores, "updates 1 element of `y` where"),
        "two lanes": (two_lanes, "stores twice to one address in one statement"),
        "adds": (adds, None),
    }


@pytest.mark.parametrize(
    "fault",
    ["past the end", "in a gap", "same store", "reads a neighbour", "adds where one stores",
     "two lanes", "adds"],
)  # fmt: skip
def test_a_planted_fault_is_found(fault: str) -> None:
    skip_unless_runs("triton", "cpu")
    kernel, said = planted()[fault]
    x = torch.ones(8)[:4:2] if fault == "in a gap" else torch.ones(4)
    seen = launch(kernel, x, torch.zeros(8))
    if said is None:
        assert_sound(seen)
        assert seen.atomics == 2
    else:
        assert seen.faults
        assert said in seen.faults[0]


def test_a_reader_is_told_which_programs_meet() -> None:
    skip_unless_runs("triton", "cpu")
    kernel, _ = planted()["same store"]
    watched = watch(lambda: kernel[3,](torch.ones(4), torch.zeros(8)))
    assert not watched.is_sound
    assert repr(watched) == (
        "same_store: 3 programs; elements loaded 3, stored 3, updated atomically 0\n"
        "✗ program 1 stores 1 element of `y` where program 0 stores\n"
        "✗ program 2 stores 1 element of `y` where another program stores"
    )
    sound, _ = planted()["adds"]
    told = repr(watch(lambda: sound[3,](torch.ones(4), torch.zeros(8))))
    assert told.endswith("✓ No program touches what another one stores.")
    assert repr(watch(lambda: None)) == "○ No kernel was launched."


def test_programs_are_named_by_their_ids() -> None:
    skip_unless_runs("triton", "cpu")
    kernel, _ = planted()["same store"]
    told = repr(watch(lambda: kernel[1, 2](torch.ones(4), torch.zeros(8))))
    assert "program (0, 1) stores 1 element of `y` where program (0, 0) stores" in told
