"""The rows of the benchmark: what is measured of a shape, and how.

`measure_shape` goes through the lists, the passes and the kernels of one shape, judges each against
`judging` and measures it, then dense attention beside them. It reads no command line and writes
no file (`bench` does).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product

import torch
from tqdm import tqdm

from nsa_tutorial.bench import drawing, judging
from nsa_tutorial.bench.problem import GRADIENTS, Problem, Results, Shape, dense_kernels
from nsa_tutorial.bench.steps import PROBE, STEPS

Call = Callable[[], Results]


@dataclass(frozen=True)
class Row(Shape):
    """One measurement, of one shape.

    Attributes:
        operator, kernel, change: what ran; `change` says what differs from the kernel as `ops`
            calls it, empty where nothing does.
        direction: the pass: forward, backward or both.
        lists, overlap: how the lists were drawn, and how many blocks four neighbours list together
            over how many one of them does; empty for windows and for dense attention.
        ms, ms_low, ms_high: median, 20 % and 80 % quantile of a call, in milliseconds; None where
            it could not run.
        peak_mib: MiB of memory that a call takes at most, its results among them, on top of what it
            is given (a backward: also what the forward kept); None on a CPU.
        dense_ratio: time of the fastest dense attention of the same shape, pass and run, over this
            one; None where none was measured.
        error, d_q_error, d_k_error, d_v_error: largest difference of the output and of each
            gradient from fp64, where they were checked (`judging`).
        is_right: whether all of them are rounding; None where nothing was judged.
        note: why it could not run.
    """

    operator: str
    kernel: str
    change: str
    direction: str
    lists: str = ""
    overlap: float | None = None
    ms: float | None = None
    ms_low: float | None = None
    ms_high: float | None = None
    peak_mib: float | None = None
    dense_ratio: float | None = None
    error: float | None = None
    d_q_error: float | None = None
    d_k_error: float | None = None
    d_v_error: float | None = None
    is_right: bool | None = None
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """What is measured of every shape.

    Attributes:
        operator: `"selected"` or `"window"`.
        backends, directions, lists: by name; for windows, `("",)` in place of lists.
        device: `"cpu"` or `"cuda"`.
        steps, with_dense: whether kernels with one decision changed, and dense attention, are
            measured, too.
        seconds: spent on each measurement.
        jobs: kernels compiled at a time.
    """

    operator: str
    backends: tuple[str, ...]
    directions: tuple[str, ...]
    lists: tuple[str, ...]
    device: str
    steps: bool
    with_dense: bool
    seconds: float
    jobs: int


# -- one row --


def measure(
    call: Callable[[], object], device: str, *, seconds: float
) -> tuple[float, float, float]:
    """Median, 20 % and 80 % quantile of a call's time, in milliseconds; the first call is not
    counted."""
    call()
    if device == "cuda":
        from triton.testing import do_bench

        return tuple(
            do_bench(call, warmup=100 * seconds, rep=1000 * seconds, quantiles=[0.5, 0.2, 0.8])
        )
    from torch.utils.benchmark import Timer

    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    times = (
        torch.tensor(timer.blocked_autorange(min_run_time=seconds).times, dtype=torch.float64) * 1e3
    )
    return tuple(times.quantile(torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64)).tolist())


def peak_mib(call: Callable[[], object], device: str) -> float | None:
    """MiB that a call takes at most, on top of what is allocated before it; None on a CPU."""
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measured(
    row: Row, make: Callable[[], Call], device: str, seconds: float,
    truth: dict[str, list[judging.Part]] | None,
) -> Row:  # fmt: skip
    """The row with what was measured, and judged where there is a truth; with a note, where the
    call did not run."""
    try:
        call = make()
        if truth is not None:
            errors, is_right = judging.judge(call(), truth)
            names = {"o": "error"} | {name: f"{name}_error" for name in GRADIENTS}
            row = replace(row, **{names[x]: error for x, error in errors.items()})
            row = replace(row, is_right=is_right)
        ms, low, high = measure(call, device, seconds=seconds)
        return replace(row, ms=ms, ms_low=low, ms_high=high, peak_mib=peak_mib(call, device))
    except Exception as error:  # a compiler may refuse one of the variants: that is a result too
        last = (str(error).strip().splitlines() or [""])[-1]
        return replace(row, note=f"{type(error).__name__}: {last[:200]}")


# -- all rows of one shape --


def measure_shape(shape: Shape, plan: Plan, bar: tqdm) -> list[Row]:
    """All rows of one shape: the lists and passes one after the other, then dense attention."""
    device, seconds, rows = plan.device, plan.seconds, []
    problem = Problem.make(plan.operator, shape, device)
    blank = partial(Row, **asdict(shape), operator=plan.operator)
    for lists in plan.lists:
        if lists:
            problem = problem.with_lists(lists)
            overlap = drawing.overlap(problem.block_indices)
            blank = partial(blank, lists=lists, overlap=overlap)
        bar.set_description(f"{shape.tokens} tokens, the truth in fp64")
        truth = judging.truth(problem, gradients=set(plan.directions) != {"forward"})
        for direction in plan.directions:
            calls = _calls(problem, direction, plan)
            if plan.steps:
                bar.set_description(f"{shape.tokens} tokens, compiling {len(calls)} kernels")
                with ThreadPoolExecutor(plan.jobs) as pool:
                    list(pool.map(_attempt, calls.values()))
            for (kernel, change), make in calls.items():
                bar.set_description(f"{shape.tokens} tokens, {lists} {kernel} {direction} {change}")
                row = blank(kernel=kernel, change=change, direction=direction)
                judged = None if change == PROBE else truth
                rows.append(measured(row, make, device, seconds, judged))
    if not plan.with_dense:
        return rows
    dense = []
    for direction, (kernel, run) in product(plan.directions, dense_kernels(problem).items()):
        bar.set_description(f"{shape.tokens} tokens, {kernel} {direction}")
        row = blank(kernel=kernel, change="", direction=direction, lists="", overlap=None)
        make = partial(problem.prepare, direction, run)
        dense.append(measured(row, make, device, seconds, None))
    return with_ratios(rows + dense, dense)


def _calls(
    problem: Problem, direction: str, plan: Plan
) -> dict[tuple[str, str], Callable[[], Call]]:
    """What makes each call of a pass, by kernel and change."""
    calls = {}
    for name in plan.backends:
        run = partial(_output, name)
        calls[name, ""] = partial(problem.prepare, direction, run)
        if plan.steps and (name, direction) in STEPS:
            for change, call in STEPS[name, direction](problem):
                calls[name, change] = partial(_named, direction, call)
    return calls


def _output(backend: str, problem: Problem) -> torch.Tensor:
    return problem.attend(backend)[0]


def _named(direction: str, call: Callable[[], object]) -> Call:
    """A step's call, whose results go by name."""
    if direction == "forward":
        return lambda: {"o": call()}
    return lambda: dict(zip(GRADIENTS, call(), strict=True))


def _attempt(make: Callable[[], Call]) -> None:
    """Compile; what goes wrong here goes wrong again when it is measured, and is noted there."""
    with contextlib.suppress(Exception), torch.no_grad():
        make()()


def with_ratios(rows: list[Row], dense: list[Row]) -> list[Row]:
    """The rows of a shape, each beside the fastest dense attention of its pass."""
    fastest = {}
    for row in dense:
        if row.ms is not None:
            fastest[row.direction] = min(row.ms, fastest.get(row.direction, row.ms))
    return [
        replace(row, dense_ratio=fastest[row.direction] / row.ms)
        if row.ms and row.direction in fastest
        else row
        for row in rows
    ]
