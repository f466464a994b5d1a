"""Imports that Ctrl-C or a notebook's ■ cannot cut short: the interrupt waits until the import is
done.

Python forgets a module whose import is interrupted, but not the parts of it that were already
there. The next import then finds half a package, and fails until the process is started anew. The
first call of a kernel imports Triton or TileLang, a second of work, so readers do interrupt it.

Nothing here hurries or stops anything else: an interrupt of a running kernel comes at once.
"""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import ModuleType


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Let an interrupt wait until the end of the block. Python interrupts the main thread alone, so
    in any other thread there is nothing to do."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came = []
    signal.signal(signal.SIGINT, lambda *arguments: came.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])


def import_module(name: str) -> ModuleType:
    """Import a module, whole."""
    if name in sys.modules:
        return importlib.import_module(name)
    with held_back():
        return importlib.import_module(name)
