"""A TileLang kernel on the CPU: what its compilation reads, and that it leaves nothing behind but
its place in TileLang's own files."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nsa_tutorial.runtime import environment

pytestmark = pytest.mark.skipif(
    environment.detect().why_not("tilelang") is not None, reason="TileLang does not run here"
)


def compile_anew() -> object:
    """A kernel that doubles three numbers."""
    import tilelang
    from tilelang import language as T

    from nsa_tutorial.runtime.tilelang_cpu import compile_for_cpu

    @T.prim_func
    def double(x: T.Tensor((3,), "float32"), y: T.Tensor((3,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.serial(3):
                y[i] = x[i] * 2.0

    tilelang.disable_cache()
    try:
        return compile_for_cpu(double)
    finally:
        tilelang.enable_cache()


def test_no_temporary_files_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled anew, and run after its library's file is gone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    kernel = compile_anew()
    assert not [path.name for path in tmp_path.iterdir() if path.suffix in (".cpp", ".so")]
    x, y = torch.ones(3), torch.zeros(3)
    kernel(x, y)
    assert torch.equal(y, 2 * x)


def test_simplifications_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """TileLang's passes have the names that we know: its own simplifications are left out, and of
    the compiler's the last one alone, that of the finished kernel."""
    from tvm.ir.transform import Pass

    run, changed = Pass.__call__, []

    def noted(self: Pass, module: object) -> object:
        found = run(self, module)
        changed.append((str(self.info.name), not found.same_as(module)))
        return found

    monkeypatch.setattr(Pass, "__call__", noted)
    compile_anew()
    its_own, common = ([is_new for passed, is_new in changed if passed == name]
                 for name in ("tl.Simplify", "tirx.Simplify"))  # fmt: skip
    assert len(its_own) > 1 and not any(its_own)
    assert len(common) > 1 and common == [True] * (len(common) - 1) + [False]


def test_the_header_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """g++ takes it, as it says with -H; where the folder's name has a space, it is left out."""
    from tilelang.env import TILELANG_TEMPLATE_PATH

    from nsa_tutorial.runtime import compiled_header

    if Path(compiled_header.get_cplus_compiler()).name != "g++":
        pytest.skip("other compilers have ways of their own")
    flags = compiled_header.flags.__wrapped__
    room = SimpleNamespace(TILELANG_CACHE_DIR=str(tmp_path / "two words"))
    monkeypatch.setattr(compiled_header, "env", room)
    assert flags("-O2") == []
    room.TILELANG_CACHE_DIR = str(tmp_path)
    include, header = flags("-O2")
    source = tmp_path / "source.cpp"
    source.write_text(compiled_header.HEADER)
    command = ["g++", "-std=c++17", "-fPIC", "-O2", f"-I{TILELANG_TEMPLATE_PATH}", "-H", "-c"]
    command += [include, header, str(source), "-o", str(tmp_path / "source.o")]
    read = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    assert f"! {header}.gch" in read  # "!": it is valid and taken
    assert "half.hpp" not in read  # nothing is read as text
