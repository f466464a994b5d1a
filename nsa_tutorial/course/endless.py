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


def refuse_leaving_a_loop(function: Callable) -> None:
    """Look through the kernels that a function names.

    Raises:
        TypeError: if one has a `break` or a `continue`.
    """
    code = inspect.unwrap(function).__code__
    known = inspect.unwrap(function).__globals__
    for name in code.co_names:
        kernel = getattr(known.get(name), "fn", None)
        if not inspect.isfunction(kernel):
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(kernel)))
        for node in ast.walk(tree):
            if isinstance(node, ast.Break | ast.Continue):
                word = type(node).__name__.lower()
                raise TypeError(
                    f"`{name}` has a `{word}`. The interpreter runs it, but Triton compiles none: "
                    "let the loop's condition say when it is over"
                )
