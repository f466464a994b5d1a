"""What the kernels become on a GPU, shown without one: CUDA C++ from TileLang, TTGIR and PTX from
Triton.

`tilelang_cuda` and `triton_stages` take the kernels of chapters 10 and 11, `basic_cuda` and
`basic_stages` those of chapter 09.

Both compilers run on the CPU and need no CUDA device; the text depends on the compiler's version
and the target alone. Triton's compiler and its interpreter exclude each other within a process, so
Triton compiles in a second process.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from nsa_tutorial.course.source import Listing
from nsa_tutorial.runtime import environment

# One shape for every chapter that shows what a kernel becomes: 4 heads with groups of 16, width
# 128, blocks of 64 tokens.
EXAMPLE = {"H": 4, "G": 16, "D": 128, "DV": 128, "BS": 64}
POINTERS = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32"}  # in Triton's signatures
# Chapter 09's kernels, each at one size; in `attention` a group of 4 query heads, width 64.
BASIC_EXAMPLES = {
    "copy": {"BN": 1024},
    "softmax": {"BR": 4, "BN": 256},
    "matmul": {"BM": 64, "BN": 64, "BK": 32, "NUM_STAGES": 2},  # in TileLang also N = K = 4096
    "attention": {
        "G": 4, "D": 64, "DV": 64, "CAUSAL": True, "BQ": 64, "BK": 64, "DT": 64, "DVT": 64,
        "NUM_STAGES": 2,
    },
}  # fmt: skip


@functools.cache
def tilelang_cuda(arch: str = "sm_90", dtype: str = "float16", **shape: int) -> str:
    """The CUDA C++ of `tilelang_forward.build_kernel`.

    Args:
        arch: `"sm_80"` (A100), `"sm_90"` (H100, H200) or another architecture TileLang knows.
        dtype: `"float16"`, `"bfloat16"` or `"float32"`.
        shape: arguments of `build_kernel`; those of `EXAMPLE` where left out.

    Raises:
        BackendUnavailable: one sentence, where TileLang is not installed.
    """
    environment.require("tilelang", "cuda")
    from nsa_tutorial.kernels import tilelang_forward

    kernel = tilelang_forward.build_kernel(**{**EXAMPLE, **shape}, dtype=dtype)
    return _cuda_source(kernel, arch, tilelang_forward.PASS_CONFIGS)


@functools.cache
def basic_cuda(name: str, arch: str = "sm_90", dtype: str = "float16") -> str:
    """The CUDA C++ of chapter 09's TileLang kernel `name`, at the size of `BASIC_EXAMPLES`. Args
    and errors as above."""
    environment.require("tilelang", "cuda")
    from nsa_tutorial.kernels import tilelang_basics

    # each language has its own default
    sizes = {key: n for key, n in BASIC_EXAMPLES[name].items() if key != "NUM_STAGES"}
    if name == "matmul":
        sizes |= {"N": 4096, "K": 4096}
    if "CAUSAL" in sizes:
        sizes["causal"] = sizes.pop("CAUSAL")
    return _cuda_source(
        getattr(tilelang_basics, name)(**sizes, dtype=dtype), arch, tilelang_basics.PASS_CONFIGS
    )


def _cuda_source(kernel: object, arch: str, pass_configs: Mapping[object, object]) -> str:
    """Lower a kernel, which takes TileLang seconds, or recall the text: it is kept on disk beside
    TileLang's compiled kernels.

    A text's name is a hash of all that it depends on: the kernel's own representation, the target,
    the passes, the version.
    """
    import tilelang
    import tvm

    passes = sorted((str(name), value) for name, value in pass_configs.items())
    parts = (tvm.ir.save_json(kernel), arch, passes, tilelang.__version__)
    known = _cache_folder() / f"{hashlib.sha256(repr(parts).encode()).hexdigest()}.cu"
    if known.exists():
        return known.read_text()
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    with tvm.transform.PassContext(config=dict(pass_configs)), target:
        source = tilelang.lower(kernel, target=target).kernel_source
    # a folder that cannot be written to costs time, nothing else
    with contextlib.suppress(OSError):
        known.parent.mkdir(parents=True, exist_ok=True)
        unfinished = known.with_suffix(f".{os.getpid()}")
        unfinished.write_text(source)
        unfinished.replace(known)
    return source


def _cache_folder() -> Path:
    import tilelang

    return Path(tilelang.env.TILELANG_CACHE_DIR) / "cuda"


def excerpt(language: str, *words: str, arch: str = "sm_90", lines: int = 2) -> Listing:
    """The first `lines` lines that hold each of `words` in what a kernel becomes, with their
    number: a place to start reading.

    Args:
        language: `"tilelang"` for CUDA C++, `"triton"` for PTX; of the kernels at the sizes of
            `EXAMPLE`, in fp16.
        words: names of functions or instructions.
        arch, lines: the GPU, and how many lines of each to show.

    Returns:
        A listing; where the language is not installed, one that says so in a sentence.
    """
    missing = _why_not(language)
    if missing:
        return Listing(missing, "")
    return _excerpt(
        language,
        triton_stages(arch)["ptx"] if language == "triton" else tilelang_cuda(arch),
        words,
        arch,
        lines,
    )


def basic_excerpt(
    language: str, name: str, *words: str, arch: str = "sm_90", lines: int = 1
) -> Listing:
    """The same of chapter 09's kernel `name`, in fp16 at the size of `BASIC_EXAMPLES`; long lines
    are cut."""
    missing = _why_not(language)
    if missing:
        return Listing(missing, "")
    text = basic_stages(name, arch)["ptx"] if language == "triton" else basic_cuda(name, arch)
    found = _excerpt(language, text, words, arch, lines)
    cut = (line if len(line) <= 110 else line[:109] + "…" for line in found.code.splitlines())
    return Listing(found.title, "\n".join(cut), found.language)


def _why_not(language: str) -> str | None:
    """One sentence on why `language` cannot be compiled here: CUDA C++ needs no GPU, PTX no other
    device than there is."""
    return environment.detect().why_not(
        language, "cuda" if language == "tilelang" or environment.detect().gpu else "cpu"
    )


def _excerpt(language: str, text: str, words: tuple[str, ...], arch: str, lines: int) -> Listing:
    source = text.splitlines()
    found = {
        word: [" ".join(line.split()).replace(" {", "\n    {") for line in source if word in line]
        for word in words
    }
    counts = ", ".join(f"{len(hits)} with {word}" for word, hits in found.items())
    shown = "\n".join(line for hits in found.values() for line in hits[:lines])
    name = "PTX from Triton" if language == "triton" else "CUDA C++ from TileLang"
    return Listing(
        f"{name} for {arch}: {len(source)} lines, {counts}",
        shown,
        "text" if language == "triton" else "cuda",
    )


@functools.cache
def _triton_stages(
    arch: int, dtype: str, kernel: str, shape: tuple[tuple[str, int], ...]
) -> Mapping[str, str]:
    return _in_a_second_process(
        {"arch": arch, "dtype": dtype, "kernel": kernel, "shape": dict(shape)}
    )


def _in_a_second_process(request: dict[str, object]) -> dict:
    arch = request["arch"]
    finished = subprocess.run(
        [sys.executable, "-m", "nsa_tutorial.runtime.lowering", json.dumps(request)],
        # without line information: it holds the checkout's path, and is longer where that is longer
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_DISABLE_LINE_INFO": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode:
        raise RuntimeError(
            f"triton could not compile the kernel for sm_{arch}:\n{finished.stderr.strip()[-2000:]}"
        )
    return json.loads(finished.stdout)


def triton_stages(
    arch: str = "sm_90", dtype: str = "float16", *, kernel: str = "kernel", **shape: int
) -> Mapping[str, str]:
    """The stages of a kernel of `triton_forward` on its way to the GPU, by name: `"ttir"`,
    `"ttgir"`, `"llir"` and `"ptx"`.

    `kernel` is `"kernel"` or `"descriptor_kernel"`, other args and errors as for `tilelang_cuda`.
    """
    environment.require("triton", "cuda" if environment.detect().gpu else "cpu")
    return _triton_stages(
        int(arch.removeprefix("sm_")), dtype, kernel, tuple({**EXAMPLE, **shape}.items())
    )


@functools.cache
def basic_stages(name: str, arch: str = "sm_90", dtype: str = "float16") -> Mapping[str, str]:
    """The stages of chapter 09's Triton kernel `name`, at the size of `BASIC_EXAMPLES`. Args and
    errors as above."""
    return all_basic_stages(arch, dtype, (name,))[name]


@functools.cache
def all_basic_stages(
    arch: str = "sm_90", dtype: str = "float16", names: tuple[str, ...] = tuple(BASIC_EXAMPLES)
) -> Mapping[str, Mapping[str, str]]:
    """`basic_stages` of several kernels by name, at the price of one process."""
    environment.require("triton", "cuda" if environment.detect().gpu else "cpu")
    return _in_a_second_process(
        {"names": names, "arch": int(arch.removeprefix("sm_")), "dtype": dtype}
    )


def _compile_triton(arch: int, dtype: str, kernel: str, shape: dict[str, int]) -> dict[str, str]:
    """Runs in the second process, where triton compiles."""
    from nsa_tutorial.kernels import triton_forward
    from nsa_tutorial.kernels.triton_forward import launch_options, tile_sizes

    kernel = getattr(triton_forward, kernel)
    pointer = POINTERS[dtype]
    types = dict.fromkeys(("Q", "K", "V", "Output"), pointer)
    types |= dict.fromkeys(("BlockIndices", "FirstKey", "NumVisible"), "*i32") | {"LSE": "*fp32"}
    types |= {"scale": "fp32", "scale_log2": "fp32"}
    types |= dict.fromkeys(("R", "first_row", "H", "S", "window_size", "keys"), "i32")
    shape = {name: n for name, n in shape.items() if name != "H"}  # an ordinary argument there
    options = launch_options(**shape, itemsize=4 if dtype == "float32" else 2)
    tiles = tile_sizes(shape["G"], shape["D"], shape["DV"]) | {"BT": options.pop("BT")}
    for name, width in (("KDescriptor", shape["D"]), ("VDescriptor", shape["DV"])):
        types[name] = f"tensordesc<{pointer[1:]}[{tiles['BT']}, 1, {width}]>"
    constants = {**shape, **tiles, "WINDOW": False}
    constants = {name: constants[name] for name in kernel.arg_names if name in constants}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    aligned = [name for name in kernel.arg_names if types.get(name, "").startswith("*")]
    return _stages(kernel, signature, constants, aligned, arch, options)


def _compile_basics(names: list[str], arch: int, dtype: str) -> dict[str, dict[str, str]]:
    """Runs in the second process."""
    return {name: _compile_basic(name, arch, dtype) for name in names}


def _compile_basic(name: str, arch: int, dtype: str) -> dict[str, str]:
    """One kernel; pointers are aligned to 16 bytes, as PyTorch's are, and every other number is an
    int32."""
    from nsa_tutorial.kernels import triton_basics

    kernel, constants = getattr(triton_basics, name), BASIC_EXAMPLES[name]
    pointer = POINTERS[dtype]
    types = dict.fromkeys(("X", "Y", "A", "B", "C", "Q", "V", "Output"), pointer) | {"LSE": "*fp32"}
    if name == "attention":
        types |= {"K": pointer}
    types |= {"scale": "fp32", "scale_log2": "fp32"}
    signature = {
        arg: "constexpr" if arg in constants else types.get(arg, "i32") for arg in kernel.arg_names
    }
    # lengths are multiples of 16 here, which a launch finds out by itself: rows then begin at
    # multiples of 16 bytes
    aligned = [arg for arg in kernel.arg_names if signature[arg] not in ("constexpr", "fp32")]
    return _stages(kernel, signature, constants, aligned, arch, {"num_warps": 4})


def _stages(
    kernel: object, signature: dict[str, str], constants: dict[str, object], aligned: list[str],
    arch: int,
    options: dict[str, int],
) -> dict[str, str]:  # fmt: skip
    """Compile a Triton kernel; the arguments `aligned` are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    place = kernel.arg_names.index
    fixed = {(place(arg),): value for arg, value in constants.items()}
    multiples = {(place(arg),): [["tt.divisibility", 16]] for arg in aligned}
    source = ASTSource(kernel, signature, fixed, multiples)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return {stage: compiled.asm[stage] for stage in ("ttir", "ttgir", "llir", "ptx")}


if __name__ == "__main__":
    _request = json.loads(sys.argv[1])
    json.dump(
        _compile_basics(**_request) if "names" in _request else _compile_triton(**_request),
        sys.stdout,
    )
