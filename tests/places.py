"""Where a kernel's tests run: a place is a backend on a device, and CUDA places carry the mark
`gpu`."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from itertools import combinations
from itertools import product as product_of

import pytest
import torch

from nsa_tutorial.runtime import environment
from nsa_tutorial.runtime.order import ORDERS

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


dtypes = pytest.mark.parametrize("dtype", [pytest.param(d, id=name_of(d)) for d in DTYPES])


def places_of(backends: Sequence[str], slow: Collection[str] = ()) -> pytest.MarkDecorator:
    """A test's `backend` and `device`: each backend on the CPU, then each on CUDA. Those that are
    `slow` on the CPU carry the mark `exhaustive` there."""
    on_cpu = [
        pytest.param(b, "cpu", id=f"{b}-cpu", marks=[pytest.mark.exhaustive] if b in slow else [])
        for b in backends
    ]
    return pytest.mark.parametrize(
        ("backend", "device"),
        on_cpu + [pytest.param(b, "cuda", id=f"{b}-cuda", marks=pytest.mark.gpu) for b in backends],
    )


def product(
    name: str,
    cases: Mapping[str, object],
    backends: Sequence[str],
    quick: Mapping[torch.dtype, Collection[str]],
    dtypes: Sequence[torch.dtype] = DTYPES,
    slow: Mapping[str, Collection[str]] | None = None,
    rest: Mapping[str, Collection[str]] | None = None,
) -> pytest.MarkDecorator:
    """A test's `name`, `dtype`, `backend` and `device`: every case in every dtype on every place.

    On CUDA all of them run. On the CPU those run whose case `quick` names for the dtype, and
    `slow` for the backend if it has a list there; the others, or those that `rest` names for the
    backend, carry the mark `exhaustive` in fp32, and so do TileLang's in fp16. What is left is left
    to CUDA. No kernel computes bfloat16 on a CPU.
    """
    slow, rest = slow or {}, rest or {}
    named = [*quick.values(), *slow.values(), *rest.values()]
    unknown = {case for some in named for case in some} - cases.keys()
    assert not unknown, f"no cases of these names: {unknown}"
    params = []
    for key, case in cases.items():
        for dtype in dtypes:
            for device in ("cpu", "cuda"):
                for backend in backends:
                    if device == "cpu" and dtype == torch.bfloat16 and backend != "reference":
                        continue
                    marks = [pytest.mark.gpu] if device == "cuda" else []
                    is_quick = key in quick.get(dtype, ()) and key in slow.get(backend, cases)
                    if device == "cpu" and not is_quick:
                        if dtype != torch.float32 or key not in rest.get(backend, cases):
                            continue
                        marks = [pytest.mark.exhaustive]
                    elif device == "cpu" and dtype == torch.float16 and backend == "tilelang":
                        marks = [pytest.mark.exhaustive]  # it compiles all kernels once more
                    label = f"{key}-{name_of(dtype)}-{backend}-{device}"
                    params.append(pytest.param(case, dtype, backend, device, id=label, marks=marks))
    return pytest.mark.parametrize((name, "dtype", "backend", "device"), params)


def pairwise(*axes: Sequence[Hashable]) -> list[tuple]:
    """Rows of the product of `axes` in which every two values of different axes meet, in few rows:
    a property that two choices can break together is seen, at a fraction of the product."""

    def pairs(row: tuple) -> set[tuple]:
        return set(combinations(enumerate(row), 2))

    rows, chosen = list(product_of(*axes)), []
    missing = set().union(*map(pairs, rows))
    while missing:
        chosen.append(max(rows, key=lambda row: len(pairs(row) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


def in_dtypes(shapes: Mapping[str, object]) -> list[object]:
    """Every shape in fp64, and each of the other dtypes for some of them, in turn."""
    turn = (torch.float32, torch.float16, torch.bfloat16)
    of_shape = ((key, x, (torch.float64, turn[i % 3])) for i, (key, x) in enumerate(shapes.items()))
    return [
        pytest.param(shape, dtype, id=f"{key}-{name_of(dtype)}")
        for key, shape, dtypes in of_shape
        for dtype in dtypes
    ]


def skip_unless_runs(backend: str, device: str, dtype: torch.dtype = torch.float32) -> None:
    package = "triton" if backend in ORDERS else backend
    reason = environment.detect().why_not(package, device, name_of(dtype))
    if reason is not None:
        pytest.skip(reason)
