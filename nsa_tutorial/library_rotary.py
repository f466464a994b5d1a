"""The layer's rotary embedding as the custom operator `torch.ops.nsa_tutorial.turned_sets`, on
Triton alone: everywhere else `layer_parts.turned_sets` is PyTorch's own.

As in `library`, arguments are checked and flat, and the backend has a name.
"""

# no `from __future__ import annotations`: PyTorch reads the operators' schemas from them
from collections.abc import Iterator

from torch import Tensor

from nsa_tutorial import backends
from nsa_tutorial.backends import Table
from nsa_tutorial.runtime.devices import on_its_device
from nsa_tutorial.runtime.operators import operator
from nsa_tutorial.runtime.strides import with_new_strides

ROTARY: Table = {
    "forward": {"triton": "nsa_tutorial.kernels.triton.rotary:turned_sets"},
    "backward": {"triton": "nsa_tutorial.kernels.triton.rotary:turned_sets_backward"},
}


@operator("nsa_tutorial::turned_sets")
@on_its_device
@with_new_strides
def turned_sets(
    tensors: list[Tensor], position: Tensor | None, base: float, num_turned: int, sets: list[int],
    backend: str,
) -> list[Tensor]:  # fmt: skip
    """Each of the tensors `[B, N, S * H, D]`, cut into its `S` of `sets`, `[B, N, H, D]` each; the
    first `num_turned` of them are turned by `position [N]` or `[B, N]`, or from 0 on."""
    function = backends.load(ROTARY, "forward", backend, tensors[0])
    return function(tensors, position, base=base, num_turned=num_turned, sets=sets)


@turned_sets.register_fake
def _(tensors, position, base, num_turned, sets, backend):
    return [part for x, num in zip(tensors, sets, strict=True) for part in _empty(x, num)]


def _empty(x: Tensor, num: int) -> Iterator[Tensor]:
    B, N, heads, D = x.shape
    return (x.new_empty(B, N, heads // num, D) for _ in range(num))


@operator("nsa_tutorial::turned_sets_backward")
@on_its_device
@with_new_strides
def turned_sets_backward(
    d_outputs: list[Tensor], position: Tensor | None, base: float, num_turned: int,
    sets: list[int], backend: str,
) -> list[Tensor]:  # fmt: skip
    """The gradients of the tensors, from those of all their sets."""
    function = backends.load(ROTARY, "backward", backend, d_outputs[0])
    return function(d_outputs, position, base=base, num_turned=num_turned, sets=sets)


@turned_sets_backward.register_fake
def _(d_outputs, position, base, num_turned, sets, backend):
    found, first = [], 0
    for num in sets:
        B, N, H, D = d_outputs[first].shape
        found.append(d_outputs[first].new_empty(B, N, num * H, D))
        first += num
    return found


def _save(ctx, inputs, output) -> None:
    _, position, *ctx.options = inputs
    ctx.save_for_backward(position)


def _run(ctx, d_outputs: list[Tensor]) -> tuple:
    found = turned_sets_backward(d_outputs, *ctx.saved_tensors, *ctx.options)
    return found, None, *(None for _ in ctx.options)


turned_sets.register_autograd(_run, setup_context=_save)
