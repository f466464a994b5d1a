"""What this machine can run: detected once, reported in plain words.

`detect()` looks at the machine and returns an `Environment`, which prints as a small table and
answers, per backend, why it cannot run here. `interpret_triton()` lets Triton's kernels run on CPU
tensors; `prepare()` calls it where there is no CUDA device, before the first kernel is defined.

Nothing here is installed, and no environment variable changes: child processes inherit nothing.
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
import threading
from collections.abc import Callable
from dataclasses import dataclass

from nsa_tutorial.runtime import interpreting

# Where PyPI has wheels of them, as the markers of pyproject.toml and the table in README.md say.
PUBLISHED_FOR = {
    "triton": ("Linux on x86-64", "Linux on aarch64"),
    "tilelang": ("Linux on x86-64", "Linux on aarch64", "macOS on arm64", "Windows on x86-64"),
}
OLDEST_TRITON = (3, 6)  # as in pyproject.toml
_lock = threading.Lock()
_is_switched = False  # whether `interpret_triton` was called


class BackendUnavailable(RuntimeError):
    """A backend was asked for that this machine, or this dtype on this machine, cannot run; the
    message is one sentence."""

    def _render_traceback_(self) -> list[str]:
        """Let Jupyter show the sentence without the stack, which adds nothing to it."""
        return [str(self)]


def is_interpreted() -> bool:
    """Whether Triton runs its kernels in its interpreter here, in Python and on CPU tensors: as
    TRITON_INTERPRET says, and where it is not set, without a CUDA device."""
    asked = os.environ.get("TRITON_INTERPRET")
    if asked is not None:
        return asked.lower() in ("1", "true", "yes", "on")
    import torch

    return _is_switched or not torch.cuda.is_available()


def prepare() -> None:
    """Decide how Triton runs the kernels that are defined from now on. `nsa_tutorial.kernels` and
    `course.languages`, which every chapter's first cell imports, call this; a kernel of your own
    may need it before its definition.

    Without a CUDA device, this is `interpret_triton()`. With one, or where TRITON_INTERPRET is
    set, Triton decides for itself.
    """
    if "TRITON_INTERPRET" not in os.environ and detect().triton is not None and is_interpreted():
        interpret_triton()


def interpret_triton() -> None:
    """From now on, in this process, run Triton's kernels in its interpreter: in Python, on CPU
    tensors.

    `TRITON_INTERPRET=1` does the same where it is set before Triton is imported, and for child
    processes too; here, no variable changes. Triton decides for each kernel when it is defined, so
    kernels that were defined before this call stay compiled. Those of Triton's own language, such
    as `tl.sum`, are replaced.
    """
    global _is_switched
    with _lock:
        import triton.language  # noqa: F401
        from triton import knobs
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction

        if not knobs.runtime.interpret:
            modules = [m for name, m in sys.modules.items() if name.startswith("triton.language")]
            tensor = sys.modules["triton.language.core"].tensor
            replaced: dict[int, InterpretedFunction] = {}
            for owner in (*modules, tensor):
                for name, value in list(vars(owner).items()):
                    if isinstance(value, JITFunction):
                        new = replaced.setdefault(id(value), InterpretedFunction(value.fn))
                        # must be a plain function, because only functions bind to their object
                        setattr(owner, name, _function(new) if owner is tensor else new)
            # past the knob's own setter, which would write to os.environ
            vars(knobs.runtime)["interpret"] = True
        interpreting.hasten()
        _is_switched = True
    detect.cache_clear()


def silence_tilelang() -> None:
    """Keep TileLang's log of compilations off the screen, unless TILELANG_PRINT_ON_COMPILATION asks
    for it."""
    from tilelang.env import env

    if "TILELANG_PRINT_ON_COMPILATION" not in os.environ:
        env.TILELANG_PRINT_ON_COMPILATION = "0"


def _function(kernel: Callable) -> Callable:
    """A callable object as a function."""
    return lambda *args, **kwargs: kernel(*args, **kwargs)


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
                f"{name} is not installed here ({self.platform}; there are wheels for "
                f"{', '.join(PUBLISHED_FOR[backend])}), so its kernels do not run: the reference "
                "backend computes the same function."
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
                    "Triton runs its interpreter in this process, so its kernels take CPU tensors "
                    "only: restart without TRITON_INTERPRET=1 and without interpret_triton()."
                )
            return None
        if backend == "triton" and not self.triton_interpreted:
            return (
                "Triton compiles for the GPU in this process, so its kernels take CUDA tensors "
                "only: move the tensors to the GPU, or restart and call "
                "nsa_tutorial.runtime.environment.interpret_triton() first."
            )
        is_old = backend == "triton" and () < _release(self.triton) < (3, 7)
        if is_old and _release(self.numpy) >= (2, 4):
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
        triton_interpreted=is_interpreted(),
        numpy=numpy.__version__,
    )


def require(backend: str, device: str = "cpu", dtype: str = "float32") -> None:
    """Raise `BackendUnavailable`, with one sentence, where `backend` cannot run here."""
    reason = detect().why_not(backend, device, dtype)
    if reason is not None:
        raise BackendUnavailable(reason)
