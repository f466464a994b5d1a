"""Kernels on GPUs that are not there: what would be launched fits their shared memory, by the
options' own measure and by what the compilers say."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable

import pretending
import pytest
from pretending import GPUS, Case

from nsa_tutorial.runtime import environment
from nsa_tutorial.runtime.shared_memory import first_that_fits

needs = {
    backend: pytest.mark.skipif(
        getattr(environment.detect(), backend) is None, reason=f"{backend} is not installed"
    )
    for backend in ("triton", "tilelang")
}
BACKENDS = [pytest.param(name, marks=mark) for name, mark in needs.items()]
WIDTHS = ((64, 64), (128, 128), (192, 128), (256, 256))
GROUPS, BLOCKS = (1, 4, 16, 64), (16, 32, 64, 128)
MODULES = {
    "triton": ("launch_options", "selected.by_key_blocks_options", "decoding.options"),
    "tilelang": ("launch_options", "decoding.options"),
}
# Queries and gradients of 64 heads alone are more than a program has on the smallest GPUs.
TOO_LARGE = {
    "triton": {
        (name, 64, D, DV, 4)
        for name in ("dq_options", "query_tile_dq_options") for D, DV in WIDTHS[2:]
    },
    "tilelang": {
        ("decoding_options", 64, 256, 256, 4),
        *(("summary_dkv_options", G, 256, 256, 4) for G in GROUPS),
    },
}  # fmt: skip


def options_of(module: object) -> dict[str, Callable]:
    """The functions of a module that choose tiles by shared memory, as they are without a cache."""
    found = {}
    for name, function in vars(module).items():
        function = getattr(function, "__wrapped__", function)
        if getattr(function, "__module__", "") == module.__name__ and (
            "shared_memory" in getattr(getattr(function, "__code__", None), "co_varnames", ())
        ):
            found[name] = function
    return {name: f for name, f in found.items() if not name.startswith("_")}


# kernels that asked for more than there is while their options expected less
QUICK = [
    Case("sm_89", "triton", "decode_attention", 1, 192, 128, 128, "bfloat16"),
    Case("sm_89", "triton", "selected_attention, QUERIES, backward", 64, 256, 256, 64, "bfloat16"),
]


def assert_that_they_fit(cases: list[Case], *only: str) -> None:
    """Every kernel of the cases, or only those of a name; descriptors only where there is the
    accelerator."""
    found = pretending.launches(cases, *only)
    for case, launches in zip(cases, found, strict=True):
        capability, memory = GPUS[case.gpu]
        assert launches
        too_large = [x for x in launches if x.shared > memory]
        assert not too_large, f"{case}: {too_large}"
        with_boxes = [x.kernel for x in launches if x.has_descriptors]
        assert not with_boxes or (capability >= (9, 0) and case.dtype != "float32"), with_boxes


@needs["triton"]
def test_what_is_launched_fits() -> None:
    assert_that_they_fit(QUICK, "lists_kernel", "dq_kernel")


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_options_fit_by_their_own_measure(
    backend: str, gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every choice of tiles, for all sizes. Only a large group of wide heads in fp32 is more than
    the smallest tile on the smallest GPUs."""
    (_, memory), too_large, num_chosen = GPUS[gpu], set(), 0

    def record(choices, size, shared_memory):
        nonlocal num_chosen
        num_chosen += 1
        found = first_that_fits(choices, size, shared_memory)
        if size(*found) > shared_memory:
            too_large.add((current, *sizes[:3], sizes[4]))
        return found

    for place in MODULES[backend]:
        module = importlib.import_module(f"nsa_tutorial.kernels.{backend}.{place}")
        monkeypatch.setattr(module, "first_that_fits", record)
        for current, function in options_of(module).items():  # noqa: B007 - `record` reads it
            wanted = function.__code__.co_varnames[: function.__code__.co_argcount]
            for G, (D, DV), BS, itemsize in itertools.product(GROUPS, WIDTHS, BLOCKS, (2, 4)):
                sizes = (G, D, DV, BS, itemsize)
                given = dict(zip(("G", "D", "DV", "BS", "itemsize"), sizes, strict=True))
                given |= {"groups": 8, "S": 16, "num_blocks": 512, "shared_memory": memory}
                function(**{key: x for key, x in given.items() if key in wanted})
    assert num_chosen > 800
    assert too_large == (TOO_LARGE[backend] if memory < 100 * 1024 else set())
