"""Count the kernels that a piece of code launches, Triton's or TileLang's: an exercise asks for a
kernel, and not for its numbers alone."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from unittest import mock

NAMES = {"triton": "Triton", "tilelang": "TileLang"}


class NotLaunched(Exception):
    """An attempt gave a result without a kernel of the language that its exercise asks for."""


@contextlib.contextmanager
def counting(language: str | None) -> Iterator[list[object]]:
    """Note every launch of a kernel in the block.

    Args:
        language: `"triton"` or `"tilelang"`, installed here; None notes nothing.

    Yields:
        The kernels in the order of their launches: a Triton kernel's Python function, or
        TileLang's compiled kernel.
    """
    launched: list[object] = []
    with contextlib.ExitStack() as stack:
        for owner, name, is_one in _launchers(language):
            noted = _noted(getattr(owner, name), launched, is_one)
            stack.enter_context(mock.patch.object(owner, name, noted))
        yield launched


def expect_launch(language: str | None, launched: list[object]) -> None:
    """Refuse a result that no kernel had a part in.

    Raises:
        NotLaunched: saying what a launch looks like.
    """
    if language is None or launched:
        return
    how = {
        "triton": "the numbers came from PyTorch. A launch is written `kernel[grid](...)`, with "
        "`@triton.jit` above the kernel",
        "tilelang": "the numbers came from PyTorch. A launch calls what a function with "
        "`@tilelang.jit` above it returns",
    }
    raise NotLaunched(f"No {NAMES[language]} kernel was launched: {how[language]}.")


def _launchers(language: str | None) -> Iterator[tuple[type, str, object]]:
    """Class and name of each method that launches a kernel, and what it launches; None where a call
    launches nothing."""
    if language == "triton":
        from triton.runtime.interpreter import GridExecutor
        from triton.runtime.jit import JITFunction

        yield GridExecutor, "__call__", lambda executor, _: executor.fn
        yield JITFunction, "run", lambda kernel, options: None if options["warmup"] else kernel.fn
    if language == "tilelang":
        from tilelang import JITKernel

        yield JITKernel, "__call__", lambda kernel, _: kernel


def _noted(launch: object, launched: list[object], kernel_of: object) -> object:
    """A launching method, wrapped so that it notes the kernel."""

    @functools.wraps(launch)
    def noted(self: object, *args: object, **options: object) -> object:
        kernel = kernel_of(self, options)
        if kernel is not None:
            launched.append(kernel)
        return launch(self, *args, **options)

    return noted
