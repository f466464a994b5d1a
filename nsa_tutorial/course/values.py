"""Compare two results, and say in what they differ: numbers, tensors, lists of them, anything.

What is short is written whole: lists of up to 16 values, tensors of up to 24.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import numpy as np
import torch

from nsa_tutorial.course.attempts import NoGradient, Raised
from nsa_tutorial.course.speech import Code, Part, plain

_FEW, _FEW_NUMBERS = 16, 24  # what is written whole: values of a list, numbers of a tensor
_PAIRED = 1e-5  # of two lists, the values further apart than this are the ones to speak of
_DEEP, _MANY = 20, 10**5  # lists in lists, and values in all: more is no result of an exercise
_SCALARS = bool | int | float | str | np.generic


def unreadable(value: object) -> str:
    """Why a result cannot be compared with anything, in a sentence; empty where it can."""
    for count, (part, depth) in enumerate(_parts(value)):
        if depth == _DEEP or count == _MANY:
            kind = type(value).__name__
            return f"It returned a {kind} that holds itself, or more than can be looked through."
        if isinstance(part, torch.Tensor) and part.is_meta:
            return (
                f"It returned a tensor of shape {list(part.shape)} on the meta device, where there "
                "are no numbers. On which device do you create it?"
            )
        if isinstance(part, torch.Tensor) and part.layout != torch.strided:
            layout = str(part.layout).removeprefix("torch.")
            return f"It returned a tensor stored as {layout}. Call `.to_dense()` on it first."
    return ""


def _parts(value: object, depth: int = 0) -> Iterator[tuple[object, int]]:
    """A value and all that it holds, each with how deep inside it stands."""
    yield value, depth
    if isinstance(value, list | tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _parts(part, depth + 1)


def same(a: object, b: object, tolerance: float) -> bool:
    """Whether two results agree: same structure, shapes and non-finite places, numbers within
    `tolerance`; a mask of PyTorch's agrees with no tensor of numbers."""
    if isinstance(a, Raised) or isinstance(b, Raised):
        return isinstance(a, Raised) and isinstance(b, Raised) and a.gist == b.gist
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(same(x, y, tolerance) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key], tolerance) for key in b)
    if a is None or b is None or isinstance(a, str) or isinstance(b, str):
        return type(a) is type(b) and a == b
    if _is_only_one_a_mask(a, b):
        return False
    try:
        x, y = numbers(a), numbers(b)
    except (TypeError, ValueError, OverflowError):
        return type(a) is type(b) and bool(a == b)
    return x.shape == y.shape and torch.allclose(
        x, y, rtol=tolerance, atol=tolerance, equal_nan=True
    )


def _is_only_one_a_mask(a: object, b: object) -> bool:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    return (a.dtype == torch.bool) != (b.dtype == torch.bool)


def numbers(value: object) -> torch.Tensor:
    """A number, a flat list of numbers or a tensor of any library, as a tensor in fp64.

    Raises:
        TypeError: for anything else.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().to(torch.float64)
    if isinstance(value, bool | int | float | np.ndarray | np.generic):
        return torch.as_tensor(np.asarray(value, dtype=np.float64))
    if isinstance(value, list) and all(isinstance(x, bool | int | float) for x in value):
        return torch.tensor(value, dtype=torch.float64)
    raise TypeError(f"not a number or a tensor: {type(value).__name__}")


def short(value: object, digits: int = 4) -> str:
    """A value as a reader would write it down: four digits behind the point in a tensor, two more
    in a number of Python's, no dtype, rows below one another."""
    if isinstance(value, torch.Tensor | np.ndarray):
        array = value.detach().cpu() if isinstance(value, torch.Tensor) else value
        is_whole = isinstance(array, torch.Tensor) and not array.is_floating_point()
        array = array.numpy() if is_whole else numbers(array).numpy()
        # no blank lines between tables
        sizes = np.abs(array[np.isfinite(array) & (array != 0)])
        is_plain = sizes.size > 0 and sizes.min() >= 1e-3  # no power of ten needed for -9999.3
        text = np.array2string(array, precision=digits, separator=", ", suppress_small=is_plain)
        text = re.sub(r"\n\s*\n", "\n", text)
        one_line = sum(n > 1 for n in array.shape) <= 1  # a column [[[[1.]]]] reads better as a row
        return " ".join(text.split()) if one_line else text
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        inside = ", ".join(short(item, digits) for item in value)
        tail = "," if isinstance(value, tuple) and len(value) == 1 else ""
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{tail})"
    if type(value) is dict:
        inside = ", ".join(f"{key!r}: {short(item, digits)}" for key, item in value.items())
        return f"{{{inside}}}"
    if isinstance(value, float | np.floating):
        return f"{float(value):.{digits + 2}g}"
    return repr(value.item() if isinstance(value, np.generic) else value)


def is_short(value: object) -> bool:
    """Whether `value` is written whole: up to 16 values in lists, up to 24 numbers in a tensor."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return math.prod(value.shape) <= _FEW_NUMBERS
    leaves = list(_leaves(value)) if isinstance(value, list | tuple) else [value]
    return len(leaves) <= _FEW and all(x is None or isinstance(x, _SCALARS) for x in leaves)


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def difference(got: object, expected: object) -> str:
    """How `got` differs from `expected`, as text."""
    return plain(differences(got, expected))


def differences(
    got: object, expected: object, is_recognised: bool = False, names: tuple[str, ...] = ()
) -> tuple[Part, ...]:
    """How `got` differs from `expected`: sentences, and values as code; of a mistake that has been
    named, not what its error means in general. `names` are those of a tuple's values."""
    if got is None:
        why = "." if is_recognised else ": is the return statement missing?"
        return (f"It returned None{why}",)
    if got is ...:
        return ("A `...` came back. It is a gap that waits for your code.",)
    if isinstance(got, NoGradient):
        return (got.told,)
    if isinstance(got, Raised):
        return got.told(is_recognised)
    if isinstance(got, tuple | list) and isinstance(expected, tuple | list):
        return _of_lists(got, expected, names)
    try:
        x, y = numbers(got), numbers(expected)
    except (TypeError, ValueError, OverflowError):
        if type(got) is type(expected):
            return (_both(got, expected),)
        if isinstance(got, list) and getattr(expected, "ndim", 0) == 1:
            return ("Got a list of lists, expected one flat list.",)
        kinds = f"Got {_kind(got)}, expected {type(expected).__name__}."
        is_readable = is_short(got) and is_short(expected)
        return (kinds, _both(got, expected)) if is_readable else (kinds,)
    if x.shape != y.shape:
        return (f"Got shape {list(x.shape)}, expected {list(y.shape)}.",)
    if _is_only_one_a_mask(got, expected):
        kinds = (str(value.dtype).removeprefix("torch.") for value in (got, expected))
        return ("Got dtype {}, expected {}.".format(*kinds),)
    if x.numel() <= _FEW_NUMBERS:
        return (_both(got, expected),)
    if _are_lists(got) and _are_lists(expected):
        differs = (x != y).any(-1)
        first = [int(i) for i in differs.nonzero()[0]]
        rows = (numbers(value)[tuple(first)].long().tolist() for value in (got, expected))
        told = f"{int(differs.sum())} of {differs.numel()} rows differ, first at index {first}."
        return told, Code("got      {}\nexpected {}".format(*rows))
    gap = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, (x - y).abs().nan_to_num(math.inf))
    worst = tuple(int(i) for i in np.unravel_index(int(gap.argmax()), x.shape))
    if _is_mask(got) and _is_mask(expected):
        places = f"They differ at {int((x != y).sum())} of {x.numel()} places, first at"
        first = [int(i) for i in (x != y).nonzero()[0]]
        answers = f"got      {bool(x[tuple(first)])}\nexpected {bool(y[tuple(first)])}"
        return f"{places} index {first}.", Code(answers)
    return (
        f"The largest difference is at index {list(worst)}.",
        Code(f"got      {x[worst]:.5g}\nexpected {y[worst]:.5g}"),
    )


def _are_lists(value: object) -> bool:
    """Whether these are rows of a few integers, such as lists of blocks."""
    if not isinstance(value, torch.Tensor) or value.ndim < 2 or value.shape[-1] > _FEW:
        return False
    return not (value.is_floating_point() or value.is_complex() or value.dtype is torch.bool)


def _kind(value: object) -> str:
    if isinstance(value, tuple) and value and all(isinstance(x, torch.Tensor) for x in value):
        return f"a tuple of {len(value)} tensors"
    return f"type {type(value).__name__}"


def _is_mask(value: object) -> bool:
    return str(getattr(value, "dtype", "")) in ("torch.bool", "bool")


def _of_lists(
    got: tuple | list, expected: tuple | list, names: tuple[str, ...]
) -> tuple[Part, ...]:
    counts = (
        (f"Got {len(got)} value{'s' * (len(got) != 1)}, expected {len(expected)}.",)
        if len(got) != len(expected)
        else ()
    )
    if is_short(got) and is_short(expected):
        return *counts, _both(got, expected)
    if counts:
        return counts
    for position, (g, e) in enumerate(zip(got, expected, strict=True)):
        if isinstance(g, NoGradient):  # its sentence names the argument
            return differences(g, e)
        if not same(g, e, _PAIRED):
            names = names or getattr(expected, "_fields", ())  # a named tuple's
            where = f"`{names[position]}`" if names else f"Value {position} of the result"
            first, *others = differences(g, e)
            if isinstance(first, str):  # one sentence: "`lse`: got shape [1], expected [2]."
                return f"{where}: {first[0].lower()}{first[1:]}", *others
            return f"{where}:", first, *others
    return (_both(got, expected),)


def _both(got: object, expected: object) -> Code:
    """Both, with as many digits as it takes to tell them apart."""
    tries = (4, 6, 8)
    digits = next((n for n in tries if short(got, n) != short(expected, n)), tries[0])
    return Code("\n".join(aligned(("got", got), ("expected", expected), digits=digits)))


def aligned(*named: tuple[str, object], digits: int = 4) -> list[str]:
    """Each value behind its name, in one column; rows of a matrix stay below one another."""
    width = max(len(name) for name, _ in named)
    return [
        f"{name:<{width}} " + short(value, digits).replace("\n", "\n" + " " * (width + 1))
        for name, value in named
    ]
