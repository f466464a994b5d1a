"""What the environment says of a machine, and that the chapters survive a machine without the
kernel packages."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from nsa_tutorial.runtime import environment
from nsa_tutorial.runtime.environment import BackendUnavailable, Environment

ROOT = Path(__file__).resolve().parents[2]
LAPTOP = Environment(
    "3.11",
    "Linux on x86_64",
    "2.13.0",
    "3.7.1",
    "0.1.15",
    None,
    None,
    "/usr/bin/g++",
    True,
    "2.4.6",
)
GPU = replace(LAPTOP, gpu="NVIDIA H200", capability=(9, 0), triton_interpreted=False)
MAC = replace(LAPTOP, platform="Darwin on arm64", triton=None, tilelang=None)


@pytest.mark.parametrize(
    ("machine", "backend", "device", "dtype", "reason"),
    [
        (LAPTOP, "reference", "cpu", "bfloat16", None),
        (LAPTOP, "triton", "cpu", "float32", None),
        (LAPTOP, "tilelang", "cpu", "float16", None),
        (LAPTOP, "triton", "cpu", "bfloat16", "Triton's interpreter does not compute bfloat16"),
        (LAPTOP, "tilelang", "cpu", "bfloat16", "TileLang's C target does not compute bfloat16"),
        (
            replace(LAPTOP, triton="3.6.0"),
            "triton",
            "cpu",
            "float32",
            "Triton 3.6.0 does not run on NumPy 2.4.6",
        ),
        (replace(LAPTOP, triton="3.6.0", numpy="2.3.5"), "triton", "cpu", "float32", None),
        (replace(LAPTOP, triton="unknown version"), "triton", "cpu", "float32", None),
        (
            replace(LAPTOP, triton="3.5.1"),
            "triton",
            "cpu",
            "float32",
            "Triton 3.5.1 is older than 3.6, .*install triton>=3.6",
        ),
        (
            replace(GPU, triton="3.2.0"),
            "triton",
            "cuda",
            "float16",
            "Triton 3.2.0 is older than 3.6",
        ),
        (
            replace(LAPTOP, c_compiler=None),
            "tilelang",
            "cpu",
            "float32",
            "finds no C[+][+] compiler",
        ),
        (GPU, "triton", "cuda", "bfloat16", None),
        (GPU, "tilelang", "cuda", "bfloat16", None),
        (GPU, "tilelang", "cpu", "float32", None),
        (GPU, "triton", "cpu", "float32", "take CUDA tensors only"),
        (replace(GPU, triton_interpreted=True), "triton", "cuda", "float32", "TRITON_INTERPRET=1"),
        (MAC, "reference", "cpu", "float32", None),
        (
            MAC,
            "triton",
            "cpu",
            "float32",
            r"Triton is not installed here \(Darwin on arm64; .*Linux on x86-64",
        ),
        (MAC, "tilelang", "cpu", "float32", "TileLang is not installed here"),
    ],
)
def test_why_not(
    machine: Environment, backend: str, device: str, dtype: str, reason: str | None
) -> None:
    answer = machine.why_not(backend, device, dtype)
    if reason is None:
        assert answer is None
    else:
        assert re.search(reason, answer)
        assert answer.endswith(".") and "\n" not in answer


def test_backends() -> None:
    assert LAPTOP.backends() == ["reference", "triton", "tilelang"]
    assert GPU.backends() == ["reference", "triton", "tilelang"]
    assert GPU.backends("cpu") == ["reference", "tilelang"]
    assert MAC.backends() == ["reference"]


@pytest.mark.parametrize("machine", [LAPTOP, GPU, MAC], ids=["laptop", "gpu", "mac"])
def test_report(machine: Environment) -> None:
    text, table = str(machine), machine._repr_html_()
    for row in machine.rows():
        assert all(cell in text for cell in row)
    assert table.count("<tr>") == len(machine.rows()) + 1
    assert ("H200" in text) == (machine is GPU)


def test_detect_describes_this_process() -> None:
    import torch

    here = environment.detect()
    assert here.torch == torch.__version__
    assert (here.gpu is not None) == torch.cuda.is_available()
    assert here.triton_interpreted == (
        os.environ.get("TRITON_INTERPRET", str(int(not torch.cuda.is_available()))) == "1"
    )


def test_require_raises_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "detect", lambda: MAC)
    with pytest.raises(BackendUnavailable, match="Triton is not installed here") as caught:
        environment.require("triton")
    assert caught.value._render_traceback_() == [str(caught.value)]
    environment.require("reference")


def run(code: str, *arguments: str, **variables: str) -> str:
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**kept, **variables},
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout


IMPORT = """
import os, sys
before = dict(os.environ)
import nsa_tutorial
assert dict(os.environ) == before and "triton" not in sys.modules and "torch" not in sys.modules
"""
KERNEL = """
import torch, triton  # as torch.compile imports it
q = torch.randn(1, 20, 2, 16)
ids = torch.zeros(1, 20, 2, 1, dtype=torch.int32)
o, p = (nsa_tutorial.ops.selected_attention(q, q, q, ids, block_size=16, backend=b)
        for b in ("triton", "reference"))
assert torch.allclose(o, p, atol=1e-5)
assert os.environ.get("TRITON_INTERPRET") == before.get("TRITON_INTERPRET")
print("same")
"""


def test_the_interpreter_is_chosen_when_a_kernel_is_called() -> None:
    """Also where Triton was imported before. The import changes no variable, and where there is no
    GPU, no variable tells child processes of it, either."""
    compiles = environment.detect().gpu is not None
    assert run(IMPORT if compiles else IMPORT + KERNEL) == ("" if compiles else "same\n")


def test_a_variable_that_is_set_is_obeyed() -> None:
    code = "from nsa_tutorial.runtime import environment as e; print(e.is_interpreted())"
    assert run(code, TRITON_INTERPRET="0") == "False\n"
    assert run(code, TRITON_INTERPRET="1") == "True\n"


@pytest.fixture(scope="module")
def without_kernel_packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables for a process in which triton and tilelang cannot be found, as where neither
    is published."""
    folder = tmp_path_factory.mktemp("hidden")
    (folder / "sitecustomize.py").write_text(
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "hidden = ('triton', 'tilelang', 'tvm')\n"
        "PathFinder.find_spec = lambda name, *rest: None if name.split('.')[0] in hidden else "
        "find(name, *rest)\n"
    )
    return {"PYTHONPATH": str(folder)}


def test_operators_without_kernel_packages(without_kernel_packages: dict[str, str]) -> None:
    code = """
import torch, nsa_tutorial
from nsa_tutorial import ops
from nsa_tutorial.runtime import environment
from nsa_tutorial.course import show
print(environment.detect().backends())
q, k = torch.randn(1, 4, 2, 8), torch.randn(1, 4, 1, 8)
ids = torch.zeros(1, 4, 1, 1, dtype=torch.int32)
print(ops.selected_attention(q, k, k, ids, block_size=2).shape)
for backend in ("triton", "tilelang"):
    try:
        ops.selected_attention(q, k, k, ids, block_size=2, backend=backend)
    except environment.BackendUnavailable as error:
        print(error)
kernel = "nsa_tutorial.kernels.triton.selected.forward:kernel"
print("scores_max" in show(kernel, phase="online softmax").code)
"""
    lines = run(code, **without_kernel_packages).splitlines()
    assert lines[:2] == ["['reference']", "torch.Size([1, 4, 2, 8])"]
    assert "Triton is not installed here" in lines[2]
    assert "TileLang is not installed here" in lines[3]
    assert lines[4] == "True"


CHAPTERS = sorted(p.name for p in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))


def code_of(chapter: str) -> str:
    cells = json.loads((ROOT / "notebooks" / chapter).read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


# for a kernel; 02 to 08 do so as 01 does, in one cell
ASKING = [c for c in CHAPTERS if re.search("triton|tilelang|lowered|backend", code_of(c))]
RUN = [c for c in ASKING if not "02" <= c[:2] <= "08"]


@pytest.fixture(scope="module")
def printed_without_kernel_packages(
    without_kernel_packages: dict[str, str],
) -> Iterator[dict[str, Future[str]]]:
    """What the cells of chapters print there, a line of JSON for each chapter; as many run at a
    time as there are cores, and those that follow each other share what they import."""
    code = """
import json, sys, nbformat
from nsa_tutorial.course import execute, forked_provisioner
forked_provisioner.use()
for name in sys.argv[1:]:
    try:
        nb = execute.execute(nbformat.read(execute.NOTEBOOKS / name, as_version=4))
        texts = [
            output.get("text", "") or output.get("data", {}).get("text/plain", "")
            for cell in nb.cells for output in cell.get("outputs", [])
        ]
        told = sum(c.cell_type == "code" for c in nb.cells), "\\n".join(texts)
    except Exception as error:
        told = 0, str(error)
    print(json.dumps([name, *told]))
"""
    count = min(os.cpu_count() or 1, 4)
    with ThreadPoolExecutor(count) as pool:
        found = {}
        for names in (RUN[i::count] for i in range(count)):
            printed = pool.submit(run, code, *names, OMP_NUM_THREADS="1", **without_kernel_packages)
            found |= dict.fromkeys(names, printed)
        yield found


@pytest.mark.exhaustive
@pytest.mark.parametrize("chapter", RUN)
def test_chapters_without_kernel_packages(
    chapter: str, printed_without_kernel_packages: dict[str, Future[str]]
) -> None:
    """Chapters run to the end, and a cell that wanted a kernel says in one sentence what is
    missing."""
    lines = printed_without_kernel_packages[chapter].result().splitlines()
    ((cells, printed),) = [told for name, *told in map(json.loads, lines) if name == chapter]
    assert cells > 10, printed
    if chapter.startswith(("00", "09")):
        assert "Triton is not installed here" in printed
    if chapter.startswith(("00", "09", "10")):
        assert "TileLang is not installed here" in printed


def imports_of(chapters: list[str]) -> list[str]:
    """Each statement once."""
    statements = [x for chapter in chapters for x in ast.parse(code_of(chapter)).body]
    found = (ast.unparse(x) for x in statements if isinstance(x, ast.Import | ast.ImportFrom))
    return list(dict.fromkeys(found))


def test_the_other_chapters_need_no_kernel_package(without_kernel_packages: dict[str, str]) -> None:
    """Every chapter's imports work without; what the others import, and the mask explorer, never
    name the packages."""
    others = [chapter for chapter in CHAPTERS if chapter not in ASKING]
    explorer = "from nsa_tutorial.course.widgets import mask_explorer"
    print_modules = ["import sys", "print(*(name for name in sys.modules if 'course' in name))"]
    code = "\n".join(
        [explorer, *imports_of(others), *print_modules, *imports_of(ASKING), "print('all')"]
    )
    printed = run(code, **without_kernel_packages).splitlines()
    assert printed[-1] == "all"
    modules = printed[0].split()
    assert "nsa_tutorial.course.widgets.mask_explorer" in modules
    for name in modules:
        if re.search("widgets|exercises", name):
            source = Path(importlib.util.find_spec(name).origin).read_text()
            assert not re.search(r"import (triton|tilelang)\b|backend=", source), name
