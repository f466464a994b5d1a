"""Kernels with one decision changed at a time, and the parts of a call: the rows that `--steps`
adds to the benchmark.

`STEPS` holds, by operator, backend and pass, a function that yields what is changed and the call to
measure. A forward's call returns `o`; a backward's returns `(d_q, d_k, d_v)`, and takes `o` and
`lse` from `problem.run`. The choice of blocks is timed kernel by kernel, and `native` part by part
(`operators.parts_of`), on every backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_tutorial.bench import summary_steps
from nsa_tutorial.bench.operators import OPERATORS, parts_of
from nsa_tutorial.bench.problem import Problem, Results
from nsa_tutorial.runtime.order import Order

PROBE = "descriptors, loads and products alone"
# what else tells L2's speed from waiting: programs of a multiprocessor, and whether keys are values
L2_PROBES = {
    f"{PROBE}, {programs} to a multiprocessor{', keys as values' * keys_alone}": (
        programs, keys_alone
    )
    for keys_alone in (False, True) for programs in (6, 3, 2, 1)
}  # fmt: skip
# no attention, so there is nothing to judge
PROBES = {PROBE, "loads and products alone", "loads alone", *L2_PROBES}
Steps = Iterator[tuple[str, Callable[[], Tensor | tuple[Tensor, ...]]]]


class Step(NamedTuple):
    """One thing to measure.

    Attributes:
        make: prepares the call.
        is_variant: a kernel of its own, to be compiled ahead, many at a time.
        is_judged: whether its results are those of the operator.
        kernel: if any, how the kernels are named that alone are timed.
    """

    make: Callable[[], Callable[[], Results]]
    is_variant: bool = False
    is_judged: bool = True
    kernel: str = ""


def prepared(problem: Problem, backend: str, direction: str) -> Callable[[], Results]:
    """A pass over the operator as `ops` calls it."""
    return problem.prepare(direction, lambda p: p.run(backend))


def has_steps(operator: str, backend: str, direction: str) -> bool:
    """Whether `--steps` adds anything."""
    if operator == "selection":
        return direction == "forward" and backend != "reference"
    return operator == "native" or (operator, backend, direction) in STEPS


def steps_of(problem: Problem, backend: str, direction: str) -> Iterator[tuple[str, Step]]:
    """What is changed, or measured alone, and the step."""
    if not has_steps(problem.operator, backend, direction):
        return
    whole = partial(prepared, problem, backend, direction)
    if problem.operator == "selection":
        yield "scores alone", Step(whole, kernel="score_kernel")
        yield "pick alone", Step(whole, kernel="pick_kernel")
    elif problem.operator == "native":
        for name, part in parts_of(problem):
            if direction == "forward" or OPERATORS[part.operator].inputs:
                yield name, Step(partial(prepared, part, backend, direction), is_judged=False)
    else:
        for change, call in STEPS[problem.operator, backend, direction](problem):
            make = partial(_named, problem, direction, call)
            yield change, Step(make, is_variant=True, is_judged=change not in PROBES)


def _named(problem: Problem, direction: str, call: Callable[[], object]) -> Callable[[], Results]:
    """A step's call, whose results go by name."""
    operator = OPERATORS[problem.operator]
    if direction == "forward":
        return lambda: dict(zip(operator.outputs, [call()], strict=True))
    return lambda: {f"d_{x}": grad for x, grad in zip(operator.inputs, call(), strict=True)}


def tilelang_steps(problem: Problem) -> Steps:
    """The TileLang kernel with one decision changed at a time, the published design it comes from,
    and what its loads and products take alone."""
    from tilelang import PassConfigKey

    from nsa_tutorial.bench.variants import tilelang_first_draft
    from nsa_tutorial.bench.variants.tilelang_variants import variant
    from nsa_tutorial.kernels.tilelang.selected import launch as tilelang_launch

    shape = problem.shape
    ids = problem.ids
    token_bytes = (shape.width + shape.value_width) * problem.q.element_size()
    ids, block_size = tilelang_launch.split_long_blocks(ids, shape.block_size, token_bytes)

    def changed(
        change: str = "", pass_configs: dict[object, object] | None = None, **numbers: int
    ) -> Callable[[], Tensor]:
        configs = tuple((pass_configs or {}).items())
        return lambda: variant(change, **numbers).launch(
            problem.q, problem.k, problem.v, ids, problem.rows,
            block_size=block_size, scale=problem.scale, pass_configs=configs,
        )[0]  # fmt: skip

    def draft(num_stages: int) -> Callable[[], Tensor]:
        return lambda: tilelang_first_draft.run(
            problem.q, problem.k, problem.v, problem.block_indices, block_size=shape.block_size,
            num_stages=num_stages,
            **tilelang_first_draft.MENDED,
        )  # fmt: skip

    if shape.group % 16 == 0 and shape.width == shape.value_width <= 128:
        yield "first draft, mended, 2 stages", draft(2)
        yield "first draft, mended, 1 stage", draft(1)
    slots = ids.shape[-1]
    yield "values through registers", changed("values through registers")
    yield "weights through shared memory", changed("weights through shared memory")
    yield "no stage: each copy is waited for", changed(stages=0)
    yield "1 stage, number of slots fixed", changed(slots=slots)
    yield "2 stages, number of slots fixed", changed(slots=slots, stages=2)
    yield "3 stages, number of slots fixed", changed(slots=slots, stages=3)
    for threads in (32, 64, 128, 256):
        yield f"{threads} threads", changed(threads=threads)
    for probe in ("loads and products alone", "loads alone"):
        yield probe, changed(probe)
    yield "exact exp2", changed("", {PassConfigKey.TL_ENABLE_FAST_MATH: False})
    yield "TMA off", changed("", {PassConfigKey.TL_DISABLE_TMA_LOWER: True})
    yield (
        "warp specialisation, 128 threads",
        changed("", {PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: False}, threads=128),
    )


def newest_first(ids: Tensor) -> Tensor:
    """Lists that begin with the query's own block and end with the empty slots."""
    return ids.sort(-1, descending=True).values


def triton_steps(problem: Problem) -> Steps:
    """The Triton kernels, the one with pointers with one decision of its launch changed at a time,
    and the probe."""
    from nsa_tutorial.bench.variants import triton_l2_probe, triton_probe
    from nsa_tutorial.kernels.triton.selected import forward as triton_forward
    from nsa_tutorial.kernels.triton.selected import forward_tma as triton_descriptors

    shape = problem.shape
    ids = newest_first(problem.ids)
    # empty slots stand at the end of a list; now two blocks follow them, and they are walked
    between = ids.roll(-2, -1)

    def pointers(lists: Tensor = ids, **options: int) -> Callable[[], Tensor]:
        return changed(triton_forward.launch, lists, options)

    def descriptors(lists: Tensor = ids, **options: int) -> Callable[[], Tensor]:
        return changed(triton_descriptors.launch, lists, options)

    def changed(launch: Callable, lists: Tensor, options: dict[str, int]) -> Callable[[], Tensor]:
        return lambda: launch(
            problem.q, problem.k, problem.v, lists, problem.rows,
            block_size=shape.block_size, scale=problem.scale, **options,
        )[0]  # fmt: skip

    whole_block = max(16, shape.block_size)
    yield (
        "pointers, whole blocks, 2 warps, 2 stages",
        pointers(BT=whole_block, num_warps=2, num_stages=2),
    )
    yield "pointers", pointers()
    yield "pointers, empty slots walked", pointers(between)
    for BT in (16, 32, 64):
        if shape.block_size >= BT:
            yield f"pointers, steps of {BT} tokens", pointers(BT=BT)
    for warps in (1, 2, 4):
        yield f"pointers, {warps} warp{'s' * (warps > 1)}", pointers(num_warps=warps)
    for stages in (1, 2, 3, 4):
        yield f"pointers, {stages} stage{'s' * (stages > 1)}", pointers(num_stages=stages)
    if triton_descriptors.can_walk(problem.q, problem.k, problem.v, shape.block_size):
        yield "descriptors", descriptors()
        yield "descriptors, empty slots walked", descriptors(between)
        yield PROBE, lambda: triton_probe.loads_and_products(
            problem.q, problem.k, problem.v, ids, problem.rows, block_size=shape.block_size
        )  # fmt: skip
        for change, (programs, keys_alone) in L2_PROBES.items():
            if shape.width == shape.value_width or not keys_alone:
                yield change, partial(
                    triton_l2_probe.loads_and_products,
                    problem.q, problem.k, problem.v, ids, problem.rows,
                    block_size=shape.block_size, programs=programs, keys_alone=keys_alone,
                )  # fmt: skip
        yield "descriptors, 2 stages", descriptors(num_stages=2)
        yield (
            "descriptors, steps of 64 tokens, 2 stages",
            descriptors(BT=min(64, shape.block_size), num_stages=2),
        )


def triton_backward_steps(problem: Problem) -> Steps:
    """The Triton backward of lists with one decision changed at a time, and other designs."""
    from nsa_tutorial.bench.variants import triton_backward_variants
    from nsa_tutorial.kernels.triton.selected.lists_backward import ListsCall

    o, lse = (x.detach() for x in problem.run("triton"))
    saved = (problem.d_o, torch.zeros_like(lse), problem.q, problem.k, problem.v, o, lse)
    lists = (*(x.detach() for x in saved), problem.ids, problem.rows)
    sizes = {"scale": problem.scale, "slot_scale": None}
    BS, G = problem.shape.block_size, problem.shape.group

    def changed(change: str) -> Callable[[], tuple[Tensor, ...]]:
        launch = triton_backward_variants.variant(change)
        options = {"block_size": BS, **sizes, "order": Order.QUERIES}
        return lambda: launch.selected_backward(*lists, **options)[:3]

    def per_slot() -> tuple[Tensor, ...]:
        *saved, ids, rows = lists
        call = ListsCall.of(*saved, rows, ids=ids, block_size=BS, **sizes)
        return triton_backward_variants.per_slot(call)

    for change in triton_backward_variants.CHANGES:
        if change != triton_backward_variants.BROADCAST or G <= 4:
            yield change, changed(change)
    yield "a program per slot, atomics", per_slot


STEPS = {
    ("selected", "tilelang", "forward"): tilelang_steps,
    ("selected", "triton", "forward"): triton_steps,
    ("selected", "triton", "backward"): triton_backward_steps,
    ("compressed", "triton", "forward"): summary_steps.forward_steps,
    ("compressed", "triton", "backward"): summary_steps.backward_steps,
}
