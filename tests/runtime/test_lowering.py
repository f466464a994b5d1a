"""Any kernel becomes GPU code without a GPU; the CPU rewrite keeps its promises."""

from __future__ import annotations

import json

import pytest

from nsa_tutorial.runtime import environment, lowering

needs_tilelang = pytest.mark.skipif(
    environment.detect().tilelang is None, reason="tilelang is not installed"
)
needs_triton = pytest.mark.skipif(
    environment.detect().triton is None, reason="triton is not installed"
)
COPY = "nsa_tutorial.course.kernels.triton_basics:copy"
TYPES = {"X": "*fp16", "Y": "*fp16"}


@needs_tilelang
def test_tilelang_becomes_cuda() -> None:
    """The passes are those that are given: without TMA, the tile is copied by threads."""
    from nsa_tutorial.course.kernels import tilelang_basics

    kernel = tilelang_basics.copy(64, "float16")
    plain = lowering.cuda(kernel)
    assert "__global__ void" in plain
    assert lowering.cuda(kernel) == plain
    assert lowering.cuda(tilelang_basics.copy(128, "float16")) != plain
    assert "tma" not in lowering.cuda(kernel, "sm_90", tilelang_basics.PASS_CONFIGS)


@needs_triton
@pytest.mark.parametrize(
    ("aligned", "arch", "num_warps"),
    [
        pytest.param((), "sm_80", 4, id="any length", marks=pytest.mark.exhaustive),
        pytest.param(("N",), "sm_90", 2, id="a multiple of 16"),
    ],
)
def test_triton_becomes_ptx(aligned: tuple[str, ...], arch: str, num_warps: int) -> None:
    """The length is no multiple of anything, unless it is said to be one: then 8 numbers a load."""
    given = COPY, {"BN": 1024, "of another kernel": 1}, {**TYPES, "LSE": "*fp32"}
    found = lowering.stages(*given, aligned=aligned, arch=arch, num_warps=num_warps)
    assert list(found) == ["ttir", "ttgir", "llir", "ptx"]
    assert f".target {arch}" in found["ptx"]
    assert ("ld.global.v4" in found["ptx"]) == bool(aligned)
    assert f'"ttg.num-warps" = {num_warps}' in found["ttgir"]


@pytest.mark.exhaustive
@needs_triton
def test_a_failing_compilation_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"triton could not compile .* for sm_90"):
        lowering.stages(COPY, {"BN": 1024}, {"X": "*fp16", "Y": "a pointer"})


@needs_tilelang
def test_serialise_moves_tiles_and_loops() -> None:
    import tilelang  # noqa: F401 - it brings tvm
    from tvm import ir

    from nsa_tutorial.kernels.tilelang.selected.forward import build_kernel
    from nsa_tutorial.runtime.tilelang_cpu import serialise

    def scopes_and_kinds(kernel: object) -> tuple[set[str], set[int]]:
        nodes = json.loads(ir.save_json(kernel))["nodes"]
        strings = {
            n["data"] for n in nodes if n.get("type") == "ffi.String" and isinstance(n["data"], str)
        }
        return strings, {n["data"]["kind"] for n in nodes if n.get("type") == "tirx.For"}

    kernel = build_kernel(H=1, G=2, D=16, DV=16, BS=16, dtype="float32")
    strings, kinds = scopes_and_kinds(kernel)
    assert {"shared.dyn", "local.fragment"} <= strings, "the kernel is written for a GPU"
    assert 1 in kinds
    strings, kinds = scopes_and_kinds(serialise(kernel))
    assert not {"shared.dyn", "shared", "local.fragment"} & strings
    assert 1 not in kinds
    assert {"shared.dyn", "local.fragment"} <= scopes_and_kinds(kernel)[0], (
        "the original is left as it was"
    )
