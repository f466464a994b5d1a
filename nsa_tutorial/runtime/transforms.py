"""What operators do with tensors that carry more than values: distributed tensors, and tangents of
forward-mode AD. Each check is one look at a type or a counter."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def is_transformed() -> bool:
    """Whether the call runs inside of `torch.func.grad`, `vmap` or another transform of functions
    (and `torch.compile` does not trace it)."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def check_local(name: str, x: Tensor) -> None:
    """`x` is whole on its device."""
    if type(x).__name__ == "DTensor":  # by its name: its module takes long to import
        raise TypeError(
            f"{name}: got a DTensor, expected a plain tensor: call .to_local() on each argument"
        )


def check_no_tangent(operator: str, **arguments: object) -> None:
    """No tensor carries a tangent of forward-mode AD, for which the operator has no rule.

    Raises:
        RuntimeError: naming the operator and the argument.
    """
    if forward_ad._current_level < 0:  # no `torch.func.jvp`, no `dual_level`
        return
    for name, x in arguments.items():
        for part in x if isinstance(x, (list, tuple)) else (x,):
            is_float = isinstance(part, Tensor) and part.is_floating_point()
            if is_float and forward_ad.unpack_dual(part).tangent is not None:
                raise RuntimeError(no_tangents(operator, name))


def no_tangents(operator: str, name: str = "an input") -> str:
    """The error that an operator raises under forward-mode AD."""
    return (
        f"{operator}: {name} carries a tangent, but there is no forward-mode derivative (jvp, "
        "jacfwd): use reverse mode, by backward() or torch.func.vjp"
    )
