"""What an exercise forbids an attempt to call, found where it is called and not by its text."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode, resolve_name

COURSE = "nsa_tutorial.course"
COMPILER = "nsa_tutorial.runtime.tilelang_cpu"


class Forbidden(Exception):
    """An attempt called what its exercise is about to build."""


@functools.cache
def _name_of(func: Callable) -> str:
    """The name of a function of PyTorch, which takes longer to find than most of them run."""
    return "torch." + (resolve_name(func) or "").rpartition(".")[2]


class _Watch(TorchFunctionMode):
    """Looks at each function of PyTorch before it runs."""

    def __init__(self, forbidden: Mapping[str, str]) -> None:
        super().__init__()
        self.forbidden = forbidden

    def __torch_function__(
        self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        # `torch.softmax`, `Tensor.softmax` and `functional.softmax` are one function
        said = self.forbidden.get(_name_of(func)) or self._said_of(sys._getframe(1))
        if said is not None:
            raise Forbidden(f"{said}: you build it yourself here")
        return func(*args, **(kwargs or {}))

    def _said_of(self, frame: FrameType | None) -> str | None:
        """What the exercise calls the package whose function called PyTorch, if it forbids it."""
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            if frame.f_code.co_name == "__torch_function__":
                pass  # another watch, which looks on
            elif module == COMPILER:
                pass  # it compiles the attempt's own kernel
            elif module == COURSE or module.startswith(f"{COURSE}."):
                return None  # the checker, which called the attempt
            else:
                for package, said in self.forbidden.items():
                    if module == package or module.startswith(f"{package}."):
                        return said
            frame = frame.f_back
        return None


@contextlib.contextmanager
def forbidding(forbidden: Sequence[tuple[str, str]]) -> Iterator[None]:
    """Raise `Forbidden` where one of these is called inside.

    Args:
        forbidden: pairs of a function's full name (`"torch.softmax"`, which stands for a tensor's
            method and for `torch.nn.functional` too), `"torch.autograd"` (PyTorch's gradients), or
            a package's name, and what a sentence calls it.
    """
    if not forbidden:
        yield
        return
    with contextlib.ExitStack() as stack:
        said = dict(forbidden).get("torch.autograd")
        if said is not None:
            stack.enter_context(_without_autograd(said))
        stack.enter_context(_Watch(dict(forbidden)))
        yield


@contextlib.contextmanager
def _without_autograd(said: str) -> Iterator[None]:
    """No graph is recorded, and asking for a gradient raises."""

    def refuse(*_: object, **__: object) -> None:
        raise Forbidden(f"{said}: you build it yourself here")

    with contextlib.ExitStack() as stack:
        for module, name in (
            (torch.autograd, "grad"), (torch.autograd, "backward"), (torch.func, "grad"),
            (torch.func, "vjp"),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(module, name, refuse))
        stack.enter_context(torch.no_grad())
        yield
