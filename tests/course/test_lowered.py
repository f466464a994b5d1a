"""The course's kernels become GPU code without a GPU, for two architectures and three dtypes."""

from __future__ import annotations

import pytest

from nsa_tutorial.course import lowered
from nsa_tutorial.runtime import environment

exhaustive = pytest.mark.exhaustive
needs_tilelang = pytest.mark.skipif(
    environment.detect().tilelang is None, reason="tilelang is not installed"
)
needs_triton = pytest.mark.skipif(
    environment.detect().triton is None, reason="triton is not installed"
)
SMALL = {"D": 32, "DV": 32, "BS": 16}


# tests/kernels/tilelang/selected/test_forward.py has more widths, groups and fp32
@exhaustive
@needs_tilelang
@pytest.mark.parametrize(
    ("arch", "dtype"),
    [("sm_90", "float16"), ("sm_80", "bfloat16")],  # the first is the text that chapters show
)
def test_tilelang_becomes_cuda(arch: str, dtype: str) -> None:
    """Keys and values are copied by `cp.async`, ahead of time."""
    source = lowered.tilelang_cuda(arch, dtype)
    assert "__global__ void" in source
    assert "exp2f" in source
    assert "cp_async_gs" in source
    assert "mma_sync" in source or "wgmma" in source  # the latter for groups of 64 rows
    assert "tf32" not in source.lower()


# each architecture in 16 bits and in 32
@exhaustive
@needs_triton
@pytest.mark.parametrize(
    ("arch", "dtype", "shape"),
    [
        pytest.param("sm_90", "float16", {}, id="sm_90-float16"),
        pytest.param("sm_80", "float32", SMALL, id="sm_80-float32-small"),
        pytest.param("sm_90", "float32", {}, id="sm_90-float32"),
        pytest.param("sm_80", "bfloat16", {}, id="sm_80-bfloat16"),
    ],
)
def test_triton_becomes_ptx(arch: str, dtype: str, shape: dict[str, int]) -> None:
    stages = lowered.triton_stages(arch, dtype, **shape)
    assert set(stages) == {"ttir", "ttgir", "llir", "ptx"}
    ptx = stages["ptx"]
    assert f".target {arch}" in ptx
    assert "ex2.approx" in ptx
    assert ("mma.sync" in ptx) == (dtype != "float32"), (
        "fp32 dots are IEEE: no TF32 on the tensor cores"
    )
    assert "tf32" not in ptx


@needs_triton
@exhaustive
def test_the_keys_kernel_fills_64_rows_in_triton() -> None:
    """And adds nothing by atomics."""
    ptx = lowered.dkv_stages()["ptx"]
    assert "wgmma.mma_async.sync.aligned.m64" in ptx
    assert "atom." not in ptx


@needs_tilelang
@exhaustive  # tests/kernels/tilelang/selected/test_backward.py looks at this kernel, too
def test_the_keys_kernel_multiplies_from_registers_in_tilelang() -> None:
    """And adds nothing by atomics."""
    cuda = lowered.dkv_cuda()
    assert "wgmma_rs" in cuda
    assert "atomic" not in cuda.lower()


@pytest.mark.parametrize(
    ("language", "told"),
    [("tilelang", "CUDA C++ from TileLang"), ("triton", "PTX from Triton")],
)
def test_excerpt(language: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which lines are shown and counted, on a text of three; the chapters show a kernel's."""
    long = "y = exp2f(b) + " + "1" * 200
    text = {arch: f"// {arch}\n  x = exp2f(a)\n{long}" for arch in ("sm_80", "sm_90")}
    monkeypatch.setattr(lowered, "tilelang_cuda", lambda arch: text[arch])
    monkeypatch.setattr(lowered, "triton_stages", lambda arch: {"ptx": text[arch]})
    monkeypatch.setattr(lowered, "basic_cuda", lambda name, arch: name)
    monkeypatch.setattr(lowered, "basic_stages", lambda name, arch: {"ptx": name})
    monkeypatch.setattr(environment.Environment, "why_not", lambda *_: None)
    listing = lowered.excerpt(language, "exp2f", "sm_")
    assert listing.title == f"{told} for sm_90, 3 lines. Shown: 1 of 2 with exp2f, 1 of 1 with sm_"
    assert listing.code == "x = exp2f(a)\n// sm_90"
    assert lowered.excerpt(language, "sm_", arch="sm_80").code == "// sm_80"
    both = lowered.excerpt(language, "exp2f", lines=2)
    assert both.code.splitlines()[1] == f"{long[:99]}…"
    assert both.title.endswith("Shown: 2 of 2 with exp2f")
    assert lowered.excerpt(language, "o", name="copy").code == "copy"


@pytest.mark.parametrize("name", [None, "copy"], ids=["forward", "basic"])
@pytest.mark.parametrize("language", ["Triton", "TileLang"])
def test_excerpt_without_the_language(
    language: str, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = environment.detect()
    without = type(here)(**{**vars(here), language.lower(): None})
    monkeypatch.setattr(environment, "detect", lambda: without)
    listing = lowered.excerpt(language.lower(), "exp2f", name=name)
    assert f"{language} is not installed here" in listing.title
    assert listing.code == ""
