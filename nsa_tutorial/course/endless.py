"""Loops of a reader's that come to no end, and those that Triton's interpreter runs and its
compiler refuses."""

from __future__ import annotations

import ast
import contextlib
import inspect
import signal
import textwrap
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from nsa_tutorial.course.launches import NotLaunched


@contextlib.contextmanager
def at_most(seconds: int, error: Exception) -> Iterator[None]:
    """Raise `error` in what runs within, once that has taken so many seconds.

    In the main thread alone, and where there are such alarms: elsewhere nothing ends it.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not (is_main and hasattr(signal, "SIGALRM")):
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def refuse_leaving_a_loop(kernel: Callable, tree: ast.AST) -> None:
    """Look through the syntax tree of a kernel.

    Raises:
        NotLaunched: if it has a `break` or a `continue`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Break | ast.Continue):
            word = type(node).__name__.lower()
            raise NotLaunched(
                f"`{kernel.__name__}` has a `{word}`. The interpreter runs it, but Triton's "
                "compiler for the GPU refuses it. A mask can hide a whole step, and a loop's "
                "condition can end it."
            )


def kernels_named_in(function: Callable) -> Iterator[Callable]:
    """The Triton kernels that a function names, as Python wrote them."""
    function = inspect.unwrap(function)
    named = map(function.__globals__.get, function.__code__.co_names)
    yield from filter(inspect.isfunction, (getattr(x, "fn", None) for x in named))


def tree_of(kernel: Callable) -> ast.AST | None:
    """The syntax tree of a kernel; None of one without a source."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(kernel)))
    except (OSError, SyntaxError):
        return None
