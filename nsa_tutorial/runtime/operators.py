"""Custom operators whose first call does not wait for PyTorch's compiler.

`torch.library.custom_op` keeps the compiler out of an operator's implementation, and imports the
compiler for that at the first call, with SymPy: more than a second. Where nothing has imported the
compiler, it traces nothing, and there is nothing to keep out.
"""

import functools
import sys
from collections.abc import Callable, Collection

import torch
from torch.library import CustomOpDef


def operator(name: str, mutates: Collection[str] = ()) -> Callable[[Callable], CustomOpDef]:
    """Define a custom operator that changes the arguments `mutates` and no others; `name` is
    `"library::name"`."""

    def define(function: Callable) -> CustomOpDef:
        defined = torch.library.custom_op(name, function, mutates_args=mutates)
        by_device = getattr(defined, "_backend_fns", {})  # PyTorch's own: without it, we wait
        for device, kept_out in by_device.items():
            by_device[device] = _plain_without_a_compiler(kept_out)
        return defined

    return define


def outside_graphs(function: Callable) -> Callable:
    """`function`, which `torch.compile` calls as it is, between two graphs."""
    return functools.wraps(function)(_plain_without_a_compiler(torch._disable_dynamo(function)))


def _plain_without_a_compiler(kept_out: Callable) -> Callable:
    """The function in `kept_out`, and `kept_out` itself as soon as the compiler is there."""
    plain = getattr(kept_out, "__wrapped__", kept_out)

    def run(*args: object, **options: object) -> object:
        return (kept_out if "torch._dynamo" in sys.modules else plain)(*args, **options)

    return run
