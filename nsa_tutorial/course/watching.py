"""What kernels do to memory: every load, store and atomic operation of every program of Triton's
interpreter, held against the launch's tensors and against the launch's other programs.

    watch(column_sums, x)

Programs of a launch run in any order on a GPU, and at the same time. So a launch is sound if each
access stays inside an argument, and if no program loads or stores what another one stores. Atomic
operations may meet atomic operations, and nothing else. The interpreter runs programs one by one
and cannot show such a race by its results; the addresses show it.

TileLang's programs are not watched. Of a kernel of TileLang, its source is read: where turns of
`T.Parallel` add to one place, and where programs store to a place that does not depend on their
ids. A source without such lines may race all the same, so nothing is promised of it.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np

from nsa_tutorial.course.accesses import Accesses
from nsa_tutorial.course.launches import counting
from nsa_tutorial.runtime import environment

_FEW = 3  # faults that a reader is shown


@contextlib.contextmanager
def watching(unset: float | None = None) -> Iterator[Accesses]:
    """Watch every launch of an interpreted Triton kernel, and of TileLang's on a CPU, in the block.

    Args:
        unset: what a masked place of a load without `other` holds here, of which Triton promises
            nothing; None leaves it as the interpreter has it.
    """
    seen = Accesses()
    with contextlib.ExitStack() as stack:
        if environment.detect().triton is not None:
            stack.enter_context(_watching_triton(seen, unset))
        is_there = "tilelang" in sys.modules
        launched = stack.enter_context(counting("tilelang" if is_there else None))
        yield seen
    for kernel in dict.fromkeys(launched):
        seen.launches += launched.count(kernel)
        seen.unwatched += launched.count(kernel)
        written = getattr(kernel, "written", None)
        seen.widest = max(seen.widest, largest_tile(written))
        for tile in shared_places(written):
            seen.faults.append(f"turns of T.Parallel add to the same places of `{tile}`")
        for tensor in shared_stores(written):
            seen.faults.append(f"programs of different ids store to the same places of `{tensor}`")


@contextlib.contextmanager
def _watching_triton(seen: Accesses, unset: float | None) -> Iterator[None]:
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store = builder.create_masked_load, builder.create_masked_store
    rmw, cas = builder.create_atomic_rmw, builder.create_atomic_cas
    step, call = builder.set_grid_idx, executor.__call__

    def size_of(pointers: object) -> int:
        return max(1, pointers.get_element_ty().primitive_bitwidth // 8)

    def watched_load(self, pointers, mask, other, *rest, **options):
        seen.touch("load", pointers.data, mask.data, size_of(pointers))
        loaded = load(self, pointers, mask, other, *rest, *options.values())
        if other is None and unset is not None:
            is_loaded = np.broadcast_to(mask.data.astype(bool), loaded.data.shape)
            loaded.data = np.where(is_loaded, loaded.data, unset).astype(loaded.data.dtype)
        return loaded

    def watched_store(self, pointers, value, mask, *rest):
        seen.touch("store", pointers.data, mask.data, size_of(pointers))
        return store(self, pointers, value, mask, *rest)

    def watched_rmw(self, op, pointers, value, mask, *rest):
        seen.touch("atomic", pointers.data, mask.data, size_of(pointers))
        return rmw(self, op, pointers, value, mask, *rest)

    def watched_cas(self, pointers, *rest):
        seen.touch("atomic", pointers.data, np.ones(pointers.data.shape, bool), size_of(pointers))
        return cas(self, pointers, *rest)

    def watched_step(self, x, y, z):
        seen.step((x, y, z), self.grid_dim)
        return step(self, x, y, z)

    def watched_call(self, *args, **kwargs):
        named = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        seen.begin(self.fn.__name__, named)
        return call(self, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        for owner, name, watched in (
            (builder, "create_masked_load", watched_load),
            (builder, "create_masked_store", watched_store),
            (builder, "create_atomic_rmw", watched_rmw),
            (builder, "create_atomic_cas", watched_cas),
            (builder, "set_grid_idx", watched_step),
            (executor, "__call__", watched_call),
        ):
            stack.enter_context(mock.patch.object(owner, name, watched))
        yield


class Watched:
    """What a reader is told of a launch.

    Attributes:
        seen: what was watched.
        why_not: why nothing could be watched, if so.
        is_sound: whether all programs were watched, and nothing is wrong with them.
    """

    def __init__(self, seen: Accesses, why_not: str = "") -> None:
        self.seen, self.why_not = seen, why_not
        self.is_sound = bool(seen.launches and not seen.faults and not seen.unwatched)

    def __repr__(self) -> str:
        seen = self.seen
        if self.why_not:
            return f"○ {self.why_not}"
        if not seen.launches:
            return "○ No kernel was launched."
        lines = [
            f"{', '.join(dict.fromkeys(seen.kernels))}: {seen.programs} programs; elements loaded "
            f"{seen.loads}, stored {seen.stores}, updated atomically {seen.atomics}"
        ] * bool(seen.programs)
        if seen.unwatched:
            lines.append("○ TileLang: its programs are not watched. Only their source was read.")
        elif not seen.faults:
            lines.append("✓ No program touches what another one stores.")
        lines += [f"✗ {fault.partition(': ')[2] or fault}" for fault in seen.faults[:_FEW]]
        more = len(seen.faults) - _FEW
        return "\n".join(lines + [f"✗ and {more} more" for _ in range(more > 0)])


def watch(launch: Callable, *arguments: object, **options: object) -> Watched:
    """Call a function that launches kernels, and say which of their programs get in each other's
    way: `watch(column_sums, x)`. It sees the programs of Triton's interpreter. Where Triton
    compiles for a GPU, and of TileLang, the answer says that they were not watched."""
    here = environment.detect()
    if here.triton is not None and not here.triton_interpreted:
        return Watched(
            Accesses(),
            "watch needs Triton's interpreter, and Triton compiles for the GPU in this process: "
            "restart with TRITON_INTERPRET=1 set, and keep the tensors on the CPU.",
        )
    with watching() as seen:
        try:
            launch(*arguments, **options)
        except TypeError:
            if here.triton is not None:
                raise
            return Watched(seen, here.why_not("triton"))
    return Watched(seen)


# -- TileLang --


def shared_places(kernel: object) -> list[str]:
    """The tiles and tensors of a TileLang kernel (`@T.prim_func`) that several turns of a parallel
    loop add to at one place; none of None."""
    if kernel is None:
        return []
    from tvm import tirx

    found, turns = [], []

    def holds(node: object, is_meant: Callable[[object], bool]) -> bool:
        seen = []
        tirx.stmt_functor.post_order_visit(node, lambda inner: seen.append(is_meant(inner)))
        return any(seen)

    def enter(node: object) -> None:
        if isinstance(node, tirx.For) and node.kind == tirx.ForKind.PARALLEL:
            turns.append(node.loop_var)
        elif isinstance(node, tirx.BufferStore):
            adds = holds(
                node.value,
                lambda x: isinstance(x, tirx.BufferLoad) and x.buffer.same_as(node.buffer),
            )
            for turn in turns:
                names_it = any(
                    holds(index, lambda x, turn=turn: x.same_as(turn)) for index in node.indices
                )
                if adds and not names_it:
                    found.append(node.buffer.name)

    def leave(node: object) -> None:
        if isinstance(node, tirx.For) and node.kind == tirx.ForKind.PARALLEL:
            turns.pop()

    tirx.stmt_functor.ir_transform(kernel.body, enter, leave, ["tirx.For", "tirx.BufferStore"])
    return found


def largest_tile(kernel: object) -> int:
    """Elements of the largest tile that a TileLang kernel (`@T.prim_func`) allocates; 0 of None."""
    if kernel is None:
        return 0
    from tvm import tirx

    sizes = [0]

    def see(node: object) -> None:
        for tile in node.alloc_buffers if isinstance(node, tirx.SBlock) else ():
            sizes.append(math.prod(int(side) for side in tile.shape))

    tirx.stmt_functor.post_order_visit(kernel.body, see)
    return max(sizes)


def shared_stores(kernel: object) -> list[str]:
    """The tensors of a TileLang kernel (`@T.prim_func`) that it stores to at places that some id of
    its programs does not change; none of None. Atomic additions, stores below an `if` and places
    that are read from memory are left out."""
    if kernel is None:
        return []
    from tvm import tirx

    tensors = list(kernel.buffer_map.values())
    depends: dict[object, set] = {}  # a variable: the grid's axes that it follows from
    axes, conditions, found = [], [], []

    def behind(node: object) -> set:
        """The axes that an expression follows from; all of them where it reads memory."""
        names: set = set()

        def see(inner: object) -> None:
            if isinstance(inner, tirx.Var):
                names.update(depends.get(inner, ()))
            elif isinstance(inner, tirx.BufferLoad):
                names.update(axes)

        tirx.stmt_functor.post_order_visit(node, see)
        return names

    def note(tensor: object, indices: list) -> None:
        is_argument = any(tensor.same_as(argument) for argument in tensors)
        if is_argument and not conditions and set(axes) - set().union(*map(behind, indices)):
            found.append(tensor.name)

    def enter(node: object) -> None:
        if isinstance(node, tirx.For):
            thread = "" if node.thread_binding is None else node.thread_binding.thread_tag
            is_axis = thread.startswith("blockIdx") and not is_one(node.extent)
            axes.extend([thread] * is_axis)
            depends[node.loop_var] = {thread} if is_axis else behind(node.min) | behind(node.extent)
        elif isinstance(node, tirx.Bind):
            depends[node.var] = behind(node.value)
        elif isinstance(node, tirx.IfThenElse):
            conditions.append(node)
        elif isinstance(node, tirx.BufferStore):
            note(node.buffer, node.indices)
        elif is_call(getattr(node, "value", None), "tl.tileop.copy", "tl.tileop.fill"):
            for region in node.value.args:
                if is_call(region, "tl.region") and int(region.args[1]) & 2:
                    note(region.args[0].buffer, region.args[0].indices)

    def leave(node: object) -> None:
        if isinstance(node, tirx.IfThenElse):
            conditions.pop()

    def is_one(extent: object) -> bool:
        return isinstance(extent, tirx.IntImm) and int(extent) == 1

    def is_call(node: object, *names: str) -> bool:
        return isinstance(node, tirx.Call) and getattr(node.op, "name", None) in names

    kinds = ["For", "Bind", "IfThenElse", "BufferStore", "Evaluate"]
    tirx.stmt_functor.ir_transform(kernel.body, enter, leave, [f"tirx.{kind}" for kind in kinds])
    return list(dict.fromkeys(found))
