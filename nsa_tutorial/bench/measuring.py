"""The rows of the benchmark: what is measured of a shape, and how.

`measure_shape` goes through the lists, the passes and the kernels of one shape, judges each against
`judging` and measures it, then dense attention beside them. It reads no command line and writes
no file (`bench` does).
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from tqdm import tqdm

from nsa_tutorial.bench import drawing, judging, timing
from nsa_tutorial.bench.inputs import Shape
from nsa_tutorial.bench.operators import with_choice
from nsa_tutorial.bench.problem import Problem, Results, dense_kernels
from nsa_tutorial.bench.steps import Step, prepared, steps_of

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
        order: in which Triton was told to walk lists; empty where it chose, where there is none,
            and for changes, which are all made to one query in a program.
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
        note: why it could not run.
    """

    operator: str
    kernel: str
    order: str = ""
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
        orders: in which Triton is to walk lists, `"auto"` and `order.ORDERS`; other backends
            have one.
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
    orders: tuple[str, ...] = ("auto",)


# -- one row --


def measured(row: Row, step: Step, device: str, seconds: float, truth: judging.Truth | None) -> Row:
    """The row with what was measured, and judged where there is a truth; with a note, where the
    call did not run."""
    try:
        call = step.make()
        if truth is not None and step.is_judged:
            row = judged(row, call(), truth)
        if step.kernel:
            times = timing.measure_kernel(call, step.kernel, seconds=seconds)
        else:
            times = timing.measure(call, device, seconds=seconds)
        row = replace(row, **dict(zip(("ms", "ms_low", "ms_high"), times, strict=True)))
        return replace(row, peak_mib=timing.peak_mib(call, device))
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
    for lists in plan.lists:
        problem = Problem.make(plan.operator, shape, device, lists)
        blank = partial(Row, **asdict(shape), operator=plan.operator, lists=lists)
        bar.set_description(f"{shape.tokens} tokens, the truth in fp64")
        cases = _cases(problem, plan)
        for direction, (kernel, case) in product(plan.directions, cases.items()):
            orders = plan.orders if kernel == "triton" else ("auto",)
            steps = {
                (order, ""): Step(
                    partial(prepared, replace(case.problem, order=order), kernel, direction)
                )
                for order in orders
            }
            if plan.steps:
                changed = steps_of(case.problem, kernel, direction)
                steps |= {("auto", change): step for change, step in changed}
                variants = [step for step in steps.values() if step.is_variant]
                bar.set_description(f"{shape.tokens} tokens, compiling {len(variants)} kernels")
                with ThreadPoolExecutor(plan.jobs) as pool:
                    list(pool.map(_attempt, variants))
            for (order, change), step in steps.items():
                name = {"kernel": kernel, "order": order.removeprefix("auto"), "change": change}
                told = (f"{shape.tokens} tokens", direction, lists, *name.values())
                bar.set_description(" ".join(filter(None, told)))
                row = blank(**name, direction=direction, **case.known)
                rows.append(measured(row, step, device, seconds, case.truth))
    if not plan.with_dense:
        return rows
    dense = []
    for direction, (kernel, prepare) in product(plan.directions, dense_kernels(problem).items()):
        bar.set_description(f"{shape.tokens} tokens, {kernel} {direction}")
        row = blank(kernel=kernel, change="", direction=direction, lists="")
        step = Step(partial(prepare, direction))
        dense.append(measured(row, step, device, seconds, None))
    return with_ratios(rows + dense, dense)


class Case(NamedTuple):
    """What a backend is given, what its rows hold before anything is measured, and the truth."""

    problem: Problem
    known: dict[str, object]
    truth: judging.Truth | None


def _cases(problem: Problem, plan: Plan) -> dict[str, Case]:
    """A case for each backend; they differ where the backend chooses."""
    gradients = set(plan.directions) != {"forward"}
    if problem.operator != "native":
        known = {}
        if problem.operator == "selected":
            known["overlap"] = drawing.overlap(problem.block_indices)
        truth = judging.truth(problem, gradients=gradients)
        return dict.fromkeys(plan.backends, Case(problem, known, truth))
    found = {}
    for name in plan.backends:
        try:
            chosen = with_choice(problem, name)
        except Exception as error:  # the whole call fails likewise, and its row says why, too
            found[name] = Case(problem, {"note": f"{type(error).__name__}: {error}"}, None)
            continue
        truth = judging.truth(chosen, gradients=gradients)
        wrong, _ = judging.judge({"ids": chosen.block_indices}, truth)
        known = {"overlap": drawing.overlap(chosen.block_indices), "wrong_lists": wrong["ids"]}
        found[name] = Case(chosen, known, truth)
    return found


def _attempt(step: Step) -> None:
    """Compile; what goes wrong here goes wrong again when it is measured, and is noted there."""
    with contextlib.suppress(Exception), torch.no_grad():
        step.make()()


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
