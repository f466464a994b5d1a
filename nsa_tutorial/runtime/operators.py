"""Custom operators whose first call does not wait for PyTorch's compiler, and later ones not for
their own schema.

`torch.library.custom_op` keeps the compiler out of an operator's implementation, and imports the
compiler for that at the first call, with SymPy: more than a second. Where nothing has imported the
compiler, it traces nothing, and there is nothing to keep out.

At each call that needs gradients, PyTorch goes through the arguments of the schema to fill in those
that were left out. It makes the list of all of them anew for each of them, twice: for twenty
arguments, that takes as long as ten launches of a kernel. Here the list is made once.
"""

import functools
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch._library import autograd
from torch.library import CustomOpDef


def operator(name: str, mutates: Collection[str] = ()) -> Callable[[Callable], CustomOpDef]:
    """Define a custom operator that changes the arguments `mutates` and no others; `name` is
    `"library::name"`."""

    def define(function: Callable) -> CustomOpDef:
        with _listing_arguments_once():
            defined = torch.library.custom_op(name, function, mutates_args=mutates)
        by_device = getattr(defined, "_backend_fns", {})  # PyTorch's own: without it, we wait
        for device, kept_out in by_device.items():
            by_device[device] = _plain_without_a_compiler(kept_out)
        return defined

    return define


class _Listed:
    """An operator as PyTorch's autograd reads it, with the arguments of its schema in a tuple."""

    def __init__(self, overload: torch._ops.OpOverload) -> None:
        schema = overload._schema
        arguments, returns = tuple(schema.arguments), tuple(schema.returns)
        self._overload = overload
        self._schema = SimpleNamespace(arguments=arguments, returns=returns)

    def __getattr__(self, name: str) -> object:
        return getattr(self._overload, name)

    def __str__(self) -> str:
        return str(self._overload)


@contextmanager
def _listing_arguments_once() -> Iterator[None]:
    """Operators that are defined meanwhile are `_Listed` for PyTorch's autograd; where PyTorch has
    other names for it, they are defined as usual."""
    usual = getattr(autograd, "make_autograd_impl", None)
    if usual is None:
        yield
        return
    autograd.make_autograd_impl = lambda overload, defined: usual(_Listed(overload), defined)
    try:
        yield
    finally:
        autograd.make_autograd_impl = usual


def outside_graphs(function: Callable) -> Callable:
    """`function`, which `torch.compile` calls as it is, between two graphs."""
    return functools.wraps(function)(_plain_without_a_compiler(torch._disable_dynamo(function)))


def _plain_without_a_compiler(kept_out: Callable) -> Callable:
    """The function in `kept_out`, and `kept_out` itself as soon as the compiler is there."""
    plain = getattr(kept_out, "__wrapped__", kept_out)

    def run(*args: object, **options: object) -> object:
        return (kept_out if "torch._dynamo" in sys.modules else plain)(*args, **options)

    return run
