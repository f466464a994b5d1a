"""The kernels become GPU code without a GPU, for two architectures and three dtypes; the CPU
rewrite keeps its promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nsa_tutorial.runtime import environment, lowering

exhaustive = pytest.mark.exhaustive

ODD = {"G": 20, "BS": 24, "D": 40, "DV": 56}

needs_tilelang = pytest.mark.skipif(
    environment.detect().tilelang is None, reason="tilelang is not installed"
)
needs_triton = pytest.mark.skipif(
    environment.detect().triton is None, reason="triton is not installed"
)


@needs_tilelang
@pytest.mark.parametrize(
    ("arch", "dtype", "shape"),
    [
        pytest.param("sm_90", "float16", {}, id="sm_90-float16"),  # the text that chapters show
        pytest.param("sm_90", "float32", ODD, id="sm_90-float32-odd", marks=exhaustive),
        pytest.param("sm_80", "float16", {}, id="sm_80-float16", marks=exhaustive),
        pytest.param("sm_90", "bfloat16", {}, id="sm_90-bfloat16", marks=exhaustive),
        pytest.param("sm_90", "float32", {}, id="sm_90-float32", marks=exhaustive),
        *(
            pytest.param("sm_90", "bfloat16", shape, id=f"sm_90-bfloat16-{shape}", marks=exhaustive)
            for shape in (ODD, {"G": 64, "D": 192}, {"G": 1, "D": 256, "DV": 256})
        ),
    ],
)
def test_tilelang_becomes_cuda(arch: str, dtype: str, shape: dict[str, int]) -> None:
    """In fp16 keys and values are copied by `cp.async`, ahead of time and after it."""
    source = lowering.tilelang_cuda(arch, dtype, **shape)
    assert "__global__ void" in source
    if (arch, dtype, shape) == ("sm_90", "float16", {}):
        assert source.count("cp_async_gs") == 4
    assert "exp2f" in source
    on_tensor_cores = "mma_sync" in source or "wgmma" in source  # the latter for groups of 64 rows
    assert on_tensor_cores == (dtype != "float32"), (
        "fp32 stays off them: they would round it to TF32"
    )
    assert "tf32" not in source.lower()


@needs_triton
@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        ("sm_90", "float16"),
        ("sm_80", "float32"),
        pytest.param("sm_80", "float16", marks=exhaustive),
        pytest.param("sm_90", "float32", marks=exhaustive),
        pytest.param("sm_80", "bfloat16", marks=exhaustive),
        pytest.param("sm_90", "bfloat16", marks=exhaustive),
    ],
)
def test_triton_becomes_ptx(arch: str, dtype: str) -> None:
    stages = lowering.triton_stages(arch, dtype)
    assert set(stages) == {"ttir", "ttgir", "llir", "ptx"}
    ptx = stages["ptx"]
    assert f".target {arch}" in ptx
    assert "ex2.approx" in ptx
    assert ("mma.sync" in ptx) == (dtype != "float32"), (
        "fp32 dots are IEEE: no TF32 on the tensor cores"
    )
    assert "tf32" not in ptx


@needs_triton
def test_a_failing_compilation_says_so() -> None:
    with pytest.raises(RuntimeError, match="triton could not compile the kernel for sm_90"):
        lowering.triton_stages("sm_90", "float7")


@needs_tilelang
def test_serialise_moves_tiles_and_loops() -> None:
    import tilelang  # noqa: F401 - it brings tvm
    from tvm import ir

    from nsa_tutorial.kernels.tilelang_forward import build_kernel
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


@needs_tilelang
@exhaustive
def test_values_can_go_through_the_registers() -> None:
    """Then `cp.async` copies the keys alone."""
    assert lowering.tilelang_cuda("sm_90", async_values=False).count("cp_async_gs") == 2


@needs_tilelang
def test_a_text_is_lowered_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is recalled from disk for the same kernel alone: another tile, target or pass is another
    text."""
    import tilelang

    from nsa_tutorial.kernels import tilelang_basics

    lowered = []
    original = tilelang.lower
    monkeypatch.setattr(
        tilelang, "lower", lambda *a, **options: lowered.append(1) or original(*a, **options)
    )
    monkeypatch.setattr(lowering, "_cache_folder", lambda: tmp_path / "cuda")
    texts = []
    for BN, arch, passes in (
        (64, "sm_90", {}),
        (64, "sm_90", {}),
        (128, "sm_90", {}),
        (64, "sm_80", {}),
        (64, "sm_90", {"tl.disable_tma_lower": True}),
    ):
        texts.append(lowering._cuda_source(tilelang_basics.copy(BN, "float16"), arch, passes))
    assert len(lowered) == 4
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]
    assert sorted(p.suffix for p in (tmp_path / "cuda").iterdir()) == [".cu"] * 4


@needs_tilelang
def test_a_cache_that_cannot_be_written_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from nsa_tutorial.kernels import tilelang_basics

    (tmp_path / "file").write_text("")
    monkeypatch.setattr(lowering, "_cache_folder", lambda: tmp_path / "file" / "cuda")
    assert "__global__" in lowering._cuda_source(tilelang_basics.copy(64, "float16"), "sm_90", {})
