"""Tensor descriptors of keys and values: what the tensor memory accelerator of Hopper and later
fetches, one instruction a tile."""

from __future__ import annotations

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa_tutorial.runtime.devices import capability
from nsa_tutorial.runtime.rounding import next_power_of_2


def can_use_descriptors(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether keys and values can come by descriptor: 16-bit numbers on a GPU with the accelerator,
    and widths that are powers of two of at least 16.

    Only Hopper and later have the accelerator; elsewhere Triton lowers descriptors to ordinary
    loads. fp32 stays with pointers: its exact products do not use tensor cores, and descriptors
    were not measured for it.
    """
    if not (q.is_cuda and q.element_size() == 2 and k.shape[1] > 0):
        return False
    if capability(q.device) < (9, 0):
        return False
    return all(n >= 16 and n == next_power_of_2(n) for n in (q.shape[3], v.shape[3]))


def token_boxes(*tensors: Tensor, BT: int) -> list[TensorDescriptor]:
    """Of contiguous keys and values `[B, M, H, width]`: boxes of `BT` tokens of one head, from
    `[B * M, H, width]`."""
    return [TensorDescriptor.from_tensor(x.flatten(0, 1), [BT, 1, x.shape[-1]]) for x in tensors]


def flat_boxes(*tensors: Tensor, BT: int) -> list[TensorDescriptor]:
    """Of contiguous keys and values `[B, M, H, width]`: boxes of `BT` tokens of one head, from
    `[B * M, H * width]`."""
    flat = (x.flatten(0, 1).flatten(1) for x in tensors)
    return [
        TensorDescriptor.from_tensor(y, [BT, x.shape[-1]])
        for x, y in zip(tensors, flat, strict=True)
    ]
