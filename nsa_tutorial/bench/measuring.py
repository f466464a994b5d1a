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
from nsa_tutorial.bench.operators import OPERATORS, with_choice
from nsa_tutorial.bench.problem import Problem, Results, Shape, dense_kernels
from nsa_tutorial.bench.steps import PROBE, STEPS

Call = Callable[[], Results]
# The column of a row in which the error of each result stands.
COLUMNS = {
    **dict.fromkeys(("o", "k_cmp", "v_cmp"), "error"),
    "d_q": "d_q_error",
    **dict.fromkeys(("d_k", "d_k_cmp"), "d_k_error"),
    **dict.fromkeys(("d_v", "d_v_cmp", "d_o_cmp", "d_o_slc", "d_o_swa"), "d_v_error"),
    **dict.fromkeys(("d_g_cmp", "d_g_slc", "d_g_swa"), "d_g_error"),
    "ids": "wrong_lists",
}


@dataclass(frozen=True, kw_only=True)
class Row(Shape):
    """One measurement, of one shape.

    Attributes:
        operator, kernel, change: what ran; `change` says what differs from the kernel as `ops`
            calls it, empty where nothing does.
        direction: the pass: forward, backward or both.
        lists, overlap: how the lists were drawn, or the queries that choose them, and how many
            blocks four neighbours list together over how many one of them does; empty where there
            are no lists.
        ms, ms_low, ms_high: median, 20 % and 80 % quantile of a call, in milliseconds; None where
            it could not run.
        peak_mib: MiB of memory that a call takes at most, its results among them, on top of what it
            is given (a backward: also what the forward kept); None on a CPU.
        dense_ratio: time of the fastest dense attention of the same shape, pass and run, over this
            one; None where none was measured.
        error, d_q_error, d_k_error, d_v_error, d_g_error: largest difference of the output and of
            each gradient from fp64, where they were checked (`judging`). Keys and values may be
            summaries; for the gated sum, values are the branches.
        wrong_lists: how many of the lists that were checked differ by more than rounding; None
            where nothing is chosen.
        is_right: whether all of them are rounding; None where nothing was judged.
        note: why it could not run, or what another backend did in its place.
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
    d_g_error: float | None = None
    wrong_lists: int | None = None
    is_right: bool | None = None
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """What is measured of every shape.

    Attributes:
        operator: of `operators.OPERATORS`.
        backends, directions, lists: by name; `("",)` in place of lists where there are none.
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
    row: Row, make: Callable[[], Call], device: str, seconds: float, truth: judging.Truth | None
) -> Row:
    """The row with what was measured, and judged where there is a truth; with a note, where the
    call did not run."""
    try:
        call = make()
        if truth is not None:
            row = judged(row, call(), truth)
        ms, low, high = measure(call, device, seconds=seconds)
        return replace(row, ms=ms, ms_low=low, ms_high=high, peak_mib=peak_mib(call, device))
    except Exception as error:  # a compiler may refuse one of the variants: that is a result too
        last = (str(error).strip().splitlines() or [""])[-1]
        return replace(row, note=f"{type(error).__name__}: {last[:200]}")


def judged(row: Row, found: Results, truth: judging.Truth) -> Row:
    """The row with the errors of these results; of what shares a column, the largest one."""
    errors, is_right = judging.judge(found, truth)
    columns = {}
    for name, error in errors.items():
        columns.setdefault(COLUMNS[name], []).append(error)
    # `max` would lose a NaN that does not come first
    largest = {x: next((e for e in y if e != e), max(y)) for x, y in columns.items()}
    if "ids" in found:
        largest["overlap"] = drawing.overlap(found["ids"])
    return replace(
        row, **largest, is_right=is_right and not largest.get("wrong_lists", row.wrong_lists)
    )


# -- all rows of one shape --


def measure_shape(shape: Shape, plan: Plan, bar: tqdm) -> list[Row]:
    """All rows of one shape: the lists and passes one after the other, then dense attention."""
    device, seconds, rows = plan.device, plan.seconds, []
    problem = Problem.make(plan.operator, shape, device)
    blank = partial(Row, **asdict(shape), operator=plan.operator)
    for lists in plan.lists:
        if lists:
            problem = problem.with_lists(lists)
            blank = partial(blank, lists=lists)
        bar.set_description(f"{shape.tokens} tokens, the truth in fp64")
        truths = _truths(problem, plan)
        for direction in plan.directions:
            calls = _calls(problem, direction, plan)
            if plan.steps:
                bar.set_description(f"{shape.tokens} tokens, compiling {len(calls)} kernels")
                with ThreadPoolExecutor(plan.jobs) as pool:
                    list(pool.map(_attempt, calls.values()))
            for (kernel, change), make in calls.items():
                bar.set_description(f"{shape.tokens} tokens, {lists} {kernel} {direction} {change}")
                row, truth = truths[kernel]
                row = blank(kernel=kernel, change=change, direction=direction, **row)
                row = measured(row, make, device, seconds, None if change == PROBE else truth)
                rows.append(row)
    if not plan.with_dense:
        return rows
    dense = []
    for direction, (kernel, prepare) in product(plan.directions, dense_kernels(problem).items()):
        bar.set_description(f"{shape.tokens} tokens, {kernel} {direction}")
        row = blank(kernel=kernel, change="", direction=direction, lists="")
        dense.append(measured(row, partial(prepare, direction), device, seconds, None))
    return with_ratios(rows + dense, dense)


def _truths(
    problem: Problem, plan: Plan
) -> dict[str, tuple[dict[str, object], judging.Truth | None]]:
    """By backend, what each of its rows holds before anything is measured, and the truth."""
    gradients = set(plan.directions) != {"forward"}
    if problem.operator != "native":
        known = {}
        if problem.operator == "selected":
            known["overlap"] = drawing.overlap(problem.block_indices)
        truth = judging.truth(problem, gradients=gradients)
        return dict.fromkeys(plan.backends, (known, truth))
    found = {}
    for name in plan.backends:
        try:
            chosen = with_choice(problem, name)
        except Exception as error:  # the whole call fails likewise, and its row says why
            found[name] = {"note": f"{type(error).__name__}: {error}"}, None
            continue
        truth = judging.truth(chosen, gradients=gradients)
        ids = chosen.block_indices
        wrong, _ = judging.judge({"ids": ids}, truth)
        known = {"overlap": drawing.overlap(ids), "wrong_lists": wrong["ids"]}
        found[name] = known, truth
    return found


def _calls(
    problem: Problem, direction: str, plan: Plan
) -> dict[tuple[str, str], Callable[[], Call]]:
    """What makes each call of a pass, by kernel and change."""
    calls = {}
    for name in plan.backends:
        run = partial(_outputs, name)
        calls[name, ""] = partial(problem.prepare, direction, run)
        if plan.steps and (problem.operator, name, direction) in STEPS:
            for change, call in STEPS[problem.operator, name, direction](problem):
                calls[name, change] = partial(_named, problem, direction, call)
    return calls


def _outputs(backend: str, problem: Problem) -> tuple[torch.Tensor, ...]:
    return problem.run(backend)


def _named(problem: Problem, direction: str, call: Callable[[], object]) -> Call:
    """A step's call, whose results go by name."""
    operator = OPERATORS[problem.operator]
    if direction == "forward":
        return lambda: dict(zip(operator.outputs, [call()], strict=True))
    return lambda: {f"d_{x}": grad for x, grad in zip(operator.inputs, call(), strict=True)}


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
