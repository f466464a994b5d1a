"""How an error describes an argument: in one line, whatever its size."""

from __future__ import annotations

from torch import Tensor

FEW, SHORT = 6, 60  # items of a list, and characters of a value, that an error prints


def describe(x: object) -> str:
    """How an argument is named in an error, whatever its size: type, shape, dtype and device of a
    tensor, shape of an array, length of a long list, the value of anything else."""
    kind = type(x).__name__
    if isinstance(x, Tensor):
        return (
            f"a {str(x.dtype).removeprefix('torch.')} tensor of shape {list(x.shape)} on {x.device}"
        )
    if hasattr(x, "shape") and hasattr(x, "dtype") and x.shape:
        return f"a {kind} of shape {list(x.shape)}"
    if isinstance(x, (list, tuple)) and x and all(isinstance(part, Tensor) for part in x):
        return f"a {kind} of {len(x)} tensors"  # their numbers would fill the screen
    if isinstance(x, (list, tuple, set, dict)) and len(x) > FEW:
        return f"a {kind} of {len(x)} items"
    value = number(x) if isinstance(x, int) else repr(x)
    return f"{value if len(value) <= SHORT else value[:SHORT] + '…'} ({kind})"


def number(x: object) -> str:
    """A number as an error prints it."""
    if isinstance(x, int) and abs(x) >= 10**20:  # Python refuses to print very long integers
        return f"an int of {x.bit_length()} bits"
    return str(x)


def offsets(values: tuple[int, ...]) -> str:
    """Of packed sequences: the first ones, and the last."""
    return (
        str(list(values))
        if len(values) <= 12
        else f"[{', '.join(map(str, values[:6]))}, …, {values[-1]}]"
    )
