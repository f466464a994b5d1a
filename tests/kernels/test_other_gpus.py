"""Kernels on GPUs that are not there: what would be launched fits their shared memory, by the
options' own measure and by what the compilers say."""

from __future__ import annotations

import importlib
import itertools
import random
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
GROUP_OF_64 = (64, 256, 256, 64)  # G, D, DV, BS
GROUPS, BLOCKS = (1, 4, 16, 64), (16, 32, 64, 128)
MODULES = {
    "triton": ("launch_options", "selected.by_key_blocks_options", "decoding.options"),
    "tilelang": ("launch_options", "decoding.options"),
}
SMALL = 100 * 1024  # bytes; the smallest GPUs have less
WIDE = WIDTHS[2:]
# What 64 heads hold in fp32, with 16 keys, is more than a program has. TileLang's summaries fit,
# since the measure is cautious.
TOO_LARGE = {
    "triton": {(name, 64, *w, 4) for name in ("dq_options", "query_tile_dq_options") for w in WIDE},
    "tilelang": {
        ("block_tokens", 64, *WIDE[1], 4), ("decoding_options", 64, *WIDE[1], 4),
        *(("dq_options", 64, *widths, 4) for widths in WIDE),
        *(("summary_dkv_options", G, *WIDE[1], 4) for G in GROUPS),
    },
}  # fmt: skip
TOO_LARGE_FOR_AN_A100 = {"triton": set(), "tilelang": {("dq_options", 64, *WIDE[1], 4)}}


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


@pytest.mark.parametrize("gpu", ["sm_80", "sm_89", "sm_90"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_options_fit_by_their_own_measure(
    backend: str, gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every choice of tiles, for all sizes, but those that are known to be too large."""
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
    expected = {GPUS["sm_80"][1]: TOO_LARGE_FOR_AN_A100[backend]}
    assert too_large == (TOO_LARGE[backend] if memory < SMALL else expected.get(memory, set()))


def is_too_large(case: Case) -> bool:
    """Whether the smallest tiles of this call take more than the GPU has."""
    memory, (operator, *way) = GPUS[case.gpu][1], case.operator.split(", ")
    is_small, is_backward = memory < SMALL, "backward" in way
    if (case.G, case.dtype) != (64, "float32") or (case.D, case.DV) not in WIDE:
        return False
    is_widest = WIDE[1] == (case.D, case.DV)
    if case.backend == "triton":
        return is_small and is_backward and operator == "selected_attention"
    if operator not in ("selected_attention", "sliding_window_attention", "decode_attention"):
        return False
    if is_backward:
        return is_small or (is_widest and memory == GPUS["sm_80"][1])
    return is_small and is_widest


def assert_that_they_fit(cases: list[Case], *only: str) -> None:
    """Every kernel of the cases, or only those of a name; descriptors only where there is the
    accelerator."""
    found = pretending.outcomes(cases, *only)
    for case, (launches, refusal) in zip(cases, found, strict=True):
        capability, memory = GPUS[case.gpu]
        assert launches
        assert bool(refusal) == is_too_large(case), f"{case}: {refusal}"
        if refusal:
            assert case.gpu in refusal and str(case.D) in refusal
            continue
        too_large = [x for x in launches if x.shared > memory]
        assert not too_large, f"{case}: {too_large}"
        with_boxes = [x.kernel for x in launches if x.has_descriptors]
        assert not with_boxes or (capability >= (9, 0) and case.dtype != "float32"), with_boxes


@needs["triton"]
def test_what_is_launched_fits() -> None:
    """A large group's gradients, which are held beside its queries."""
    case = Case(
        "sm_89", "triton", "selected_attention, QUERIES, backward", *GROUP_OF_64, "bfloat16"
    )
    assert_that_they_fit([case], "dq_kernel")


# of each operator what it depends on: groups and blocks, here in pairs
PAIRS = ((1, 128), (4, 32), (16, 64), (64, 16))
OF_LISTS = [
    f"selected_attention{kind}{way}"
    for kind in (", QUERIES", ", QUERY_TILES", ", KEY_BLOCKS", ", factors", "")
    for way in ("", ", backward")
]
OF_WIDTHS = [
    f"{name}{way}" for name in ("sliding_window_attention", "compressed_attention")
    for way in ("", ", backward")
]  # fmt: skip
OPERATORS = (*OF_LISTS, *OF_WIDTHS, "select_blocks", "decode_attention")


# TileLang has one order, and takes up to a minute for a kernel; others of its kernels are lowered
# where each operator is tested
OF_TILELANG = ("selected_attention", "selected_attention, backward", *OF_WIDTHS[::2])


def drawn(backend: str) -> list[Case]:
    """Each operator on a GPU with little memory, Triton's on one with much, too, with sizes that
    are drawn."""
    dtypes = {"tilelang": ("float16",), "triton": ("bfloat16", "float32")}[backend]
    operators = {"tilelang": OF_TILELANG, "triton": OPERATORS}[backend]
    kinds = (("sm_86", "sm_89", "sm_120"), ("sm_80", "sm_90"))
    draw, cases = random.Random(f"sizes for {backend}"), []
    for operator in operators:
        for gpus in kinds if backend == "triton" else kinds[:1]:
            G, BS = draw.choice(PAIRS)
            sizes = (G, *draw.choice(WIDTHS), BS, draw.choice(dtypes))
            cases.append(Case(draw.choice(gpus), backend, operator, *sizes))
    return cases


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_that_is_launched_fits(backend: str) -> None:
    """As above, or one sentence for the sizes that are known to be too large."""
    cases = drawn(backend)
    if backend == "triton":  # one that is
        cases.append(
            Case("sm_89", backend, "selected_attention, backward", *GROUP_OF_64, "float32")
        )
        assert is_too_large(cases[-1])
    assert_that_they_fit(cases)
