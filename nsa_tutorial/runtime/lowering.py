"""What a kernel becomes on a GPU, without a GPU: CUDA C++ from TileLang, PTX from Triton.

Both compilers run on the CPU; their text depends on the compiler's version and the target alone.
Triton's compiler and its interpreter exclude each other within a process, so Triton compiles in a
second one. No kernel is named here: the caller passes TileLang kernels as objects and Triton
kernels by name.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from nsa_tutorial.runtime import environment


def cuda(
    kernel: object, arch: str = "sm_90", pass_configs: Mapping[object, object] | None = None
) -> str:
    """The CUDA C++ of a TileLang function.

    Args:
        kernel: a `tirx.PrimFunc`, not yet compiled.
        arch: `"sm_80"` (A100), `"sm_90"` (H100, H200) or another architecture TileLang knows.
        pass_configs: options of TileLang's passes, as `tilelang.compile` takes them.

    Raises:
        BackendUnavailable: one sentence, where TileLang is not installed.
    """
    environment.require("tilelang", "cuda")
    import tilelang
    import tvm

    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    with tvm.transform.PassContext(config=dict(pass_configs or {})), target:
        return tilelang.lower(kernel, target=target).kernel_source


def stages(
    kernel: str, constants: Mapping[str, object], types: Mapping[str, str], *,
    aligned: Sequence[str] = (), arch: str = "sm_90", **options: int,
) -> dict[str, str]:  # fmt: skip
    """The stages of a Triton kernel on its way to the GPU: `"ttir"`, `"ttgir"`, `"llir"`, `"ptx"`.

    Names that the kernel does not have are ignored, so one table serves several kernels.

    Args:
        kernel: `"package.module:function"`.
        constants: values of its `tl.constexpr` arguments.
        types: the other arguments' types in Triton's words, such as `"*fp16"`; `"i32"` if not here.
        aligned: integers that are multiples of 16. Pointers always are, as PyTorch's are.
        arch: as for `cuda`.
        options: `num_warps`, `num_stages`.

    Raises:
        BackendUnavailable: one sentence, where Triton is not installed.
        RuntimeError: with the compiler's last words.
    """
    return all_stages([request(kernel, constants, types, aligned=aligned, arch=arch, **options)])[0]


def request(
    kernel: str, constants: Mapping[str, object], types: Mapping[str, str], *,
    aligned: Sequence[str] = (), arch: str = "sm_90", **options: int,
) -> tuple:  # fmt: skip
    """What `stages` is asked for, to be handed to `all_stages`."""
    return kernel, dict(constants), dict(types), list(aligned), arch, options


def all_stages(requests: Sequence[tuple]) -> list[dict[str, str]]:
    """`stages` of several kernels, in one process: most of the time of one goes into its imports.

    Raises:
        BackendUnavailable, RuntimeError: as `stages`.
    """
    environment.require("triton", environment.detect().device)
    finished = subprocess.run(
        [sys.executable, "-m", "nsa_tutorial.runtime.lowering", json.dumps(requests)],
        # without line information: it holds the checkout's path, and is longer where that is longer
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_DISABLE_LINE_INFO": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode:
        asked = ", ".join(sorted({f"{name} for {arch}" for name, _, _, _, arch, _ in requests}))
        last_words = finished.stderr.strip()[-2000:]
        raise RuntimeError(f"triton could not compile {asked}:\n{last_words}")
    return json.loads(finished.stdout)


def _compile(
    name: str, constants: dict, types: dict, aligned: list, arch: str, options: dict
) -> dict[str, str]:
    """Runs in the second process."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, _, function = name.partition(":")
    kernel = getattr(importlib.import_module(module), function)
    signature, values, multiples = {}, {}, {}
    for place, arg in enumerate(kernel.arg_names):
        signature[arg] = "constexpr" if arg in constants else types.get(arg, "i32")
        if arg in constants:
            values[place,] = constants[arg]
        elif arg in aligned or signature[arg].startswith("*"):
            multiples[place,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, multiples)
    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    compiled = triton.compile(source, target=target, options=options)
    return {stage: compiled.asm[stage] for stage in ("ttir", "ttgir", "llir", "ptx")}


if __name__ == "__main__":
    json.dump([_compile(*asked) for asked in json.loads(sys.argv[1])], sys.stdout)
