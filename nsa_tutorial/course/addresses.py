"""Watch the addresses of interpreted Triton kernels: one that lies outside every tensor of the
launch stops the kernel with a sentence before the load or store happens.

On a CPU, Triton's interpreter reads and writes wherever a pointer points. A pointer that misses by
far ends the whole Python process, a notebook's kernel with everything in it. `watch()` puts a check
in front of every load, store and atomic operation of this process. What lies in the same memory as
a tensor, as the room around it does (`room`), is not outside. A load from that room may change no
result, as where its numbers get the weight 0; `noting_strays()` keeps the first one in mind.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import math
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from nsa_tutorial.course.room import is_in_room

# how the functions of Triton's begin that take a pointer first, by what they do
_MEMORY = {"load": "load", "store": "store", "change": "atomic_"}


class WildPointer(IndexError):
    """A kernel asked for an element that none of its tensors has."""

    def _render_traceback_(self) -> list[str]:
        """Let Jupyter show the sentences without the stack, which is the interpreter's."""
        return [f"{type(self).__name__}: {self}"]


@dataclass(frozen=True)
class _Tensor:
    """An argument of a launch: where it begins, and the memory that it is a part of; `stop` is
    where it ends, of a tensor that has room around it, else None."""

    name: str
    start: int
    shape: tuple[int, ...]
    first: int
    end: int
    stop: int | None


class _Launch(threading.local):
    """The launch that runs in this thread."""

    kernel: Callable | None = None
    tensors: tuple[_Tensor, ...] = ()
    memory: tuple[tuple[int, int], ...] = ()
    strays: list[str] | None = None


_launch = _Launch()


def _tensors(name: str, argument: object) -> Iterator[_Tensor]:
    """The tensors of an argument: itself, those of a tuple, or the one behind a descriptor."""
    if isinstance(argument, tuple):
        for i, each in enumerate(argument):
            yield from _tensors(f"{name}[{i}]", each)
        return
    x = getattr(argument, "base", argument)
    if isinstance(x, torch.Tensor):
        memory = x.untyped_storage()
        first, start = memory.data_ptr(), x.data_ptr()
        stop = start + x.numel() * x.element_size() if is_in_room(x) else None
        yield _Tensor(name, start, tuple(x.shape), first, first + memory.nbytes(), stop)


def _begin(kernel: Callable, arguments: dict[str, object]) -> None:
    _launch.kernel = kernel
    _launch.tensors = tuple(x for name, each in arguments.items() for x in _tensors(name, each))
    _launch.memory = tuple({(x.first, x.end) for x in _launch.tensors})


def _end() -> None:
    _launch.kernel, _launch.tensors, _launch.memory = None, (), ()


def _look(what: str, program: tuple[int, ...], pointers: object, mask: object = None) -> None:
    """Raise where an address that the mask lets through lies outside; keep in mind a load from the
    room around a tensor."""
    if _launch.kernel is None:
        return
    at = pointers.data
    size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    is_noted = what == "load" and _launch.strays == []
    if _is_inside(at, size) and not is_noted:
        return
    at = at if mask is None else at[np.broadcast_to(np.asarray(mask.data, bool), at.shape)]
    if at.size == 0:
        return
    if not _is_inside(at, size):
        inside = np.zeros(at.shape, bool)
        for first, end in _launch.memory:
            inside |= (at >= first) & (at <= end - size)
        if not inside.all():
            told = _told("would " + what, program, int(at[~inside][0]), size)
            raise WildPointer(
                f"{told}The kernel was stopped before that. Is the offset right, and the mask?"
            )
    if is_noted:
        _note(program, at, size)


def _note(program: tuple[int, ...], at: np.ndarray, size: int) -> None:
    """Keep in mind that a load asks for the room around a tensor, if it does."""
    for x in _launch.tensors:
        if x.stop is not None:
            beside = (at >= x.first) & (at < x.end) & ((at < x.start) | (at >= x.stop))
            if beside.any():
                told = _told("loads", program, int(at[beside][0]), size, x)
                _launch.strays.append(told)
                return


@contextlib.contextmanager
def noting_strays() -> Iterator[list[str]]:
    """The list of what is told of the first load in the block, by this thread's kernels, from the
    room around a tensor: empty if there is none."""
    before, _launch.strays = _launch.strays, []
    try:
        yield _launch.strays
    finally:
        _launch.strays = before


def _is_inside(at: np.ndarray, size: int) -> bool:
    """Whether all addresses lie in the memory of one tensor."""
    low, high = int(at.min()), int(at.max()) + size
    return any(first <= low and high <= end for first, end in _launch.memory)


# -- what is said --


def _told(
    what: str, program: tuple[int, ...], address: int, size: int, tensor: _Tensor | None = None
) -> str:
    """The program, the element and the tensor, as far as they are known, and the line."""
    tree, line = _statement(_launch.kernel)
    if tensor is None and line is not None:
        names = _pointers_in(tree, line, what.removeprefix("would "))
        meant = [x for x in _launch.tensors if x.name in names]
    else:
        meant = [] if tensor is None else [tensor]
    told = f"Program {program} of `{_launch.kernel.__name__}` {what} "
    if len(meant) == 1:
        (x,) = meant
        told += (
            f"element {(address - x.start) // size:,} of `{x.name}`, which has "
            f"{math.prod(x.shape):,} (shape {list(x.shape)})"
        )
    else:
        shapes = ", ".join(f"`{x.name}` {list(x.shape)}" for x in _launch.tensors)
        told += f"an element that none of its tensors has ({shapes})"
    where = f" in this line:\n    {ast.unparse(line)}\n" if line is not None else ". "
    return told + where


def _statement(kernel: Callable) -> tuple[ast.AST | None, ast.stmt | None]:
    """The kernel's source, and the statement in it that is running; None where it cannot be
    read."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != kernel.__name__:
        frame = frame.f_back
    try:
        lines, first = inspect.getsourcelines(kernel)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return None, None
    at = frame.f_lineno - first + 1 if frame else 0
    statements = [x for x in ast.walk(tree) if isinstance(x, ast.stmt)]
    running = [x for x in statements if x.lineno <= at <= x.end_lineno and not hasattr(x, "body")]
    return tree, running[0] if running else None


def _pointers_in(kernel: ast.AST, line: ast.stmt, what: str) -> set[str]:
    """The names that the pointer of the load or store in this line is computed from, back to the
    kernel's arguments."""
    made = {}
    for node in ast.walk(kernel):
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (x.id for x in targets if isinstance(x, ast.Name)):
                made.setdefault(name, set()).update(_names(node.value))
    accesses = (call for call in ast.walk(line) if _is_access(call, _MEMORY[what]))
    found = set().union(*(_names(call.args[0]) for call in accesses))
    while more := set().union(*(made.get(name, set()) for name in found)) - found:
        found |= more
    return found


def _is_access(node: ast.AST, kind: str | tuple[str, ...]) -> bool:
    """Whether it is a call that touches memory, `tl.load(pointer)`."""
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return is_call and node.func.attr.startswith(kind) and bool(node.args)


def _names(node: ast.AST) -> set[str]:
    """The names in an expression, without those inside a load, because an index is not a
    pointer."""
    if _is_access(node, tuple(_MEMORY.values())):
        return set()
    own = {node.id} if isinstance(node, ast.Name) else set()
    return own.union(*map(_names, ast.iter_child_nodes(node)))


# -- the hooks --


@functools.cache
def watch() -> None:
    """Check the addresses of each interpreted kernel that this process launches from now on."""
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    for name, what, mask in (
        ("create_masked_load", "load", 1),
        ("create_masked_store", "store", 2),
        ("create_atomic_rmw", "change", 3),
        ("create_atomic_cas", "change", None),
    ):
        position = 1 if name == "create_atomic_rmw" else 0
        setattr(builder, name, _looked_at(getattr(builder, name), what, position, mask))
    executor._init_args_hst = _noted(executor._init_args_hst)
    executor.__call__ = _told_plainly(executor.__call__)


def _looked_at(access: Callable, what: str, pointers: int, mask: int | None) -> Callable:
    """A loading or storing method of the interpreter, wrapped so that its addresses are checked;
    the positions are those of its arguments."""

    @functools.wraps(access)
    def looked_at(self, *args, **options):
        _look(what, self.grid_idx, args[pointers], None if mask is None else args[mask])
        return access(self, *args, **options)

    return looked_at


def _noted(arguments: Callable) -> Callable:
    """The method that copies a launch's tensors to the CPU, wrapped so that it notes where they
    are."""

    @functools.wraps(arguments)
    def noted(self, args, options):
        args, options = arguments(self, args, options)
        _begin(self.fn, {**dict(zip(self.arg_names, args, strict=False)), **options})
        return args, options

    return noted


def _told_plainly(launch: Callable) -> Callable:
    """A launch that reports a wild pointer without the interpreter's own errors around it."""

    @functools.wraps(launch)
    def told_plainly(self, *args, **options):
        try:
            return launch(self, *args, **options)
        except Exception as error:
            cause = error
            while cause is not None and not isinstance(cause, WildPointer):
                cause = cause.__cause__
            if cause is None:
                raise
            raise cause from None
        finally:
            _end()

    return told_plainly
