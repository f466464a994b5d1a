"""What this machine can run, found out once, said plainly.

`prepare()` runs before anything imports triton or tilelang (the package's `__init__` calls it): it
turns Triton's interpreter on where there is no CUDA device, and silences TileLang's compile log.
`detect()` looks at the machine and returns an `Environment`, which prints as a small table and
answers, per backend, why it cannot run here.

It installs nothing and changes nothing outside this process.
"""

from __future__ import annotations

import functools
import html
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass

KERNEL_PLATFORM = "Linux on x86-64"
OLDEST_TRITON = (3, 6)  # as in pyproject.toml


class BackendUnavailable(RuntimeError):
    """A backend was asked for that this machine, or this dtype on this machine, cannot run; the
    message is one sentence."""

    def _render_traceback_(self) -> list[str]:
        """Let Jupyter show the sentence alone: the stack says nothing that the sentence does
        not."""
        return [str(self)]


def prepare() -> None:
    """Set the environment variables that triton and tilelang read when they are imported.

    `TRITON_INTERPRET` is read while triton itself is imported, so it is set here, before, and only
    where no CUDA device is present. A value the user has set stays.
    """
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # triton 3.9 warns when it is unset


def _version(package: str) -> str | None:
    """The installed version of a package that can also be found for import, or None."""
    try:
        found = importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return getattr(sys.modules.get(package), "__version__", "unknown version")


def _release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version, or none where it has none."""
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2])


@dataclass(frozen=True, repr=False)
class Environment:
    """The parts of a machine that decide which kernels run, and how.

    Attributes:
        python, torch: versions.
        triton, tilelang: versions, or None where the package cannot be imported.
        gpu: name of the first CUDA device, or None. `capability` is its compute capability, e.g.
            `(9, 0)`.
        c_compiler: path of the compiler that TileLang's C target uses, or None.
        triton_interpreted: True where Triton runs its interpreter (in Python, on the CPU).
        platform: operating system and processor.
        numpy: version, on which Triton's interpreter runs.
    """

    python: str
    platform: str
    torch: str
    triton: str | None
    tilelang: str | None
    gpu: str | None
    capability: tuple[int, int] | None
    c_compiler: str | None
    triton_interpreted: bool
    numpy: str

    def why_not(self, backend: str, device: str = "cpu", dtype: str = "float32") -> str | None:
        """One sentence on why `backend` cannot run tensors of `dtype` on `device` here, or None
        where it can.

        Args:
            backend: `"reference"`, `"triton"` or `"tilelang"`.
            device: `"cpu"` or `"cuda"`, the kind of tensor.
            dtype: `"float32"`, `"float16"` or `"bfloat16"`.
        """
        if backend == "reference":
            return None
        name = {"triton": "Triton", "tilelang": "TileLang"}[backend]
        if getattr(self, backend) is None:
            return (
                f"{name} is not installed here ({self.platform}; it is published for "
                f"{KERNEL_PLATFORM}), "
                f"so its kernels do not run: the reference backend computes the same function."
            )
        if backend == "triton" and () < _release(self.triton) < OLDEST_TRITON:
            oldest = ".".join(map(str, OLDEST_TRITON))
            return (
                f"Triton {self.triton} is older than {oldest}, the oldest version these "
                f"kernels run with: install triton>={oldest}."
            )
        if device == "cuda":
            if backend == "triton" and self.triton_interpreted:
                return (
                    "Triton was imported with TRITON_INTERPRET=1, so its kernels run on CPU "
                    "tensors only: unset it and restart."
                )
            return None
        if backend == "triton" and not self.triton_interpreted:
            return (
                "Triton compiles for the GPU in this process, so its kernels take CUDA tensors "
                "only: "
                "move the tensors to the GPU, or set TRITON_INTERPRET=1 before Python starts."
            )
        if (
            backend == "triton"
            and () < _release(self.triton) < (3, 7)
            and _release(self.numpy) >= (2, 4)
        ):
            return (
                f"The interpreter of Triton {self.triton} does not run on NumPy "
                f"{self.numpy}: install triton>=3.7, or numpy<2.4."
            )
        if backend == "tilelang" and self.c_compiler is None:
            return (
                "TileLang runs CPU tensors through C and finds no C++ compiler (g++ or "
                "clang++) on the PATH: install one."
            )
        if dtype == "bfloat16":
            where = "Triton's interpreter" if backend == "triton" else "TileLang's C target"
            return (
                f"{where} does not compute bfloat16 correctly on the CPU: "
                f"use float32 or float16, the reference backend, or a CUDA device."
            )
        return None

    def backends(self, device: str | None = None) -> list[str]:
        """The backends that run float32 tensors on `device` (default: the GPU where there is one,
        else the CPU)."""
        return [
            name
            for name in ("reference", "triton", "tilelang")
            if self.why_not(name, device or self.device) is None
        ]

    @property
    def device(self) -> str:
        """`"cuda"` where there is a CUDA device, else `"cpu"`: what a chapter puts its tensors
        on."""
        return "cuda" if self.gpu else "cpu"

    def rows(self) -> list[tuple[str, str, str]]:
        """The table behind the report: what, which version, how it runs here."""
        gpu = (
            f"{self.gpu}, compute capability {self.capability[0]}.{self.capability[1]}"
            if self.gpu
            else "none: every kernel runs on the CPU"
        )
        through_c = f"translated to C, compiled by {os.path.basename(self.c_compiler or '')}"
        ways = {
            "triton": "interpreted, in Python"
            if self.triton_interpreted
            else "compiled for the GPU",
            "tilelang": "compiled for the GPU" if self.gpu else through_c,
        }
        rows = [
            ("GPU", "", gpu),
            ("Python", self.python, self.platform),
            ("PyTorch", self.torch, "reference backend"),
        ]
        for backend, name in (("triton", "Triton"), ("tilelang", "TileLang")):
            rows.append(
                (
                    name,
                    getattr(self, backend) or "–",
                    self.why_not(backend, self.device) or ways[backend],
                )
            )
        return rows

    def __repr__(self) -> str:
        return "\n".join(f"{what:<9} {version:<12} {how}" for what, version, how in self.rows())

    def _repr_html_(self) -> str:
        cells = "".join(
            "<tr>"
            + "".join(f'<td style="text-align:left">{html.escape(cell)}</td>' for cell in row)
            + "</tr>"
            for row in self.rows()
        )
        head = "<thead><tr><th></th><th>version</th><th>here</th></tr></thead>"
        return f"<table>{head}<tbody>{cells}</tbody></table>"


@functools.cache
def detect() -> Environment:
    """Look at this machine once per process and return its `Environment`."""
    import numpy
    import torch

    has_gpu = torch.cuda.is_available()
    return Environment(
        python=platform.python_version(),
        platform=f"{platform.system()} on {platform.machine()}",
        torch=torch.__version__,
        triton=_version("triton"),
        tilelang=_version("tilelang"),
        gpu=torch.cuda.get_device_name() if has_gpu else None,
        capability=torch.cuda.get_device_capability() if has_gpu else None,
        c_compiler=next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None),
        triton_interpreted=os.environ.get("TRITON_INTERPRET", "0").lower()
        in ("1", "true", "yes", "on"),
        numpy=numpy.__version__,
    )


def require(backend: str, device: str = "cpu", dtype: str = "float32") -> None:
    """Raise `BackendUnavailable`, with one sentence, where `backend` cannot run here."""
    reason = detect().why_not(backend, device, dtype)
    if reason is not None:
        raise BackendUnavailable(reason)
