"""The course's kernels as CUDA C++ and as PTX, at the sizes that the chapters show.

`tilelang_cuda` and `triton_stages` take the kernels of chapters 10 and 11, `basic_cuda` and
`basic_stages` those of chapter 09, `dkv_cuda` and `dkv_stages` chapter 13's for keys and values.
`runtime.lowering` compiles; no GPU is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from nsa_tutorial.course.source import Listing
from nsa_tutorial.runtime import environment, lowering

# One shape for every chapter that shows what a kernel becomes: 4 heads with groups of 16, width
# 128, blocks of 64 tokens.
EXAMPLE = {"H": 4, "G": 16, "D": 128, "DV": 128, "BS": 64}
# Chapter 09's kernels, each at one size; in `attention` a group of 4 query heads, width 64.
BASIC_EXAMPLES = {
    "copy": {"BN": 1024},
    "softmax": {"BR": 4, "BN": 256},
    "matmul": {"BM": 64, "BN": 64, "BD": 32},
    "attention": {"G": 4, "D": 64, "DV": 64, "BQ": 64, "BK": 64, "DT": 64, "DVT": 64},
}
FORWARD = "nsa_tutorial.kernels.triton.selected.forward:kernel"
POINTERS = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32"}  # in Triton's signatures


@functools.cache
def tilelang_cuda(arch: str = "sm_90", dtype: str = "float16", **shape: int) -> str:
    """The CUDA C++ of `tilelang.selected.forward.build_kernel`, whose arguments `shape` are those
    of `EXAMPLE` where left out. `arch` and errors as for `lowering.cuda`."""
    environment.require("tilelang", "cuda")
    from nsa_tutorial.kernels.tilelang.compiling import ALL_THREADS_LOAD
    from nsa_tutorial.kernels.tilelang.selected import forward

    kernel = forward.build_kernel(**{**EXAMPLE, **shape}, dtype=dtype)
    return lowering.cuda(kernel, arch, ALL_THREADS_LOAD)


@functools.cache
def basic_cuda(name: str, arch: str = "sm_90", dtype: str = "float16") -> str:
    """The CUDA C++ of chapter 09's TileLang kernel `name`, at the size of `BASIC_EXAMPLES`."""
    environment.require("tilelang", "cuda")
    from nsa_tutorial.course.kernels import tilelang_basics as basics

    fixed_here = {"matmul": {"N": 4096, "K": 4096}, "attention": {"causal": True}}
    kernel = getattr(basics, name)(**BASIC_EXAMPLES[name], **fixed_here.get(name, {}), dtype=dtype)
    return lowering.cuda(kernel, arch, basics.PASS_CONFIGS)


@functools.cache
def triton_stages(
    arch: str = "sm_90", dtype: str = "float16", *, kernel: str = FORWARD, **shape: int
) -> Mapping[str, str]:
    """The stages, `"ttir"` to `"ptx"`, of a Triton kernel that computes chapter 11's forward.

    `kernel` is its name as `show` takes it; `shape` as for `tilelang_cuda`, errors as for
    `lowering.stages`.
    """
    environment.require("triton", environment.detect().device)
    from nsa_tutorial.kernels.triton.launch_options import launch_options, tile_sizes

    # H is an ordinary argument here
    sizes = {name: n for name, n in {**EXAMPLE, **shape}.items() if name != "H"}
    options = launch_options(**sizes, itemsize=4 if dtype == "float32" else 2)
    tiles = tile_sizes(sizes["G"], sizes["D"], sizes["DV"]) | {"BT": options.pop("BT")}
    types = _types(dtype, "Q", "K", "V", "Output")
    types |= dict.fromkeys(("BlockIndices", "FirstKey", "NumVisible"), "*i32")
    for name, width in (("KDescriptor", "D"), ("VDescriptor", "DV")):
        types[name] = f"tensordesc<{POINTERS[dtype][1:]}[{tiles['BT']}, 1, {sizes[width]}]>"
    constants = {**sizes, **tiles, "SlotScale": None, "Count": None, "T": 1}
    return lowering.stages(kernel, constants, types, arch=arch, **options)


@functools.cache
def basic_stages(name: str, arch: str = "sm_90", dtype: str = "float16") -> Mapping[str, str]:
    """The stages of chapter 09's Triton kernel `name`, at the size of `BASIC_EXAMPLES`."""
    types = _types(dtype, *("Q", "K", "V", "Output") if name == "attention" else "XYABC")
    return lowering.stages(
        f"nsa_tutorial.course.kernels.triton_basics:{name}",
        {**BASIC_EXAMPLES[name], "CAUSAL": True, "NUM_STAGES": 2},
        types,
        aligned=("M", "N", "K", "R", "HQ"),  # rows then begin at multiples of 16 bytes
        arch=arch,
        num_warps=4,
    )


@functools.cache
def dkv_cuda(arch: str = "sm_90", dtype: str = "float16") -> str:
    """The CUDA C++ of `tilelang.selected.backward.build_dkv` for lists, at the size of
    `EXAMPLE`."""
    environment.require("tilelang", "cuda")
    from nsa_tutorial.kernels.tilelang.compiling import ALL_THREADS_LOAD
    from nsa_tutorial.kernels.tilelang.launch_options import dkv_options
    from nsa_tutorial.kernels.tilelang.selected import backward

    sizes = {name: EXAMPLE[name] for name in ("G", "D", "DV", "BS")}
    options = dkv_options(**sizes, itemsize=4 if dtype == "float32" else 2)
    kernel = backward.build_dkv(**EXAMPLE, **options, dtype=dtype)
    return lowering.cuda(kernel, arch, ALL_THREADS_LOAD)


@functools.cache
def dkv_stages(arch: str = "sm_90", dtype: str = "float16") -> Mapping[str, str]:
    """The stages of chapter 13's Triton kernel for the keys and values of lists, at the size of
    `EXAMPLE`; arguments and errors as for `triton_stages`."""
    environment.require("triton", environment.detect().device)
    from nsa_tutorial.kernels.triton.launch_options import dkv_options, tile_sizes

    sizes = {name: n for name, n in EXAMPLE.items() if name != "H"}
    options = dkv_options(**sizes, itemsize=4 if dtype == "float32" else 2)
    tiles = {name: options.pop(name) for name in ("BT", "BR")}
    tiles |= tile_sizes(sizes["G"], sizes["D"], sizes["DV"])
    flags = dict.fromkeys(("SLOT_SCALE", "WIDE"), False)
    constants = {**sizes, **tiles, **flags, "Factors": None, "EDGE": sizes["BS"]}
    types = _types(dtype, "Q", "K", "V", "GradO", "GradK", "GradV")
    types |= dict.fromkeys(("Delta", "LSE2", "SharesK", "SharesV"), "*fp32")
    tables = ("Rows", "RowEnd", "FirstKey", "Head", "First", "Last", "NumParts")
    types |= dict.fromkeys((*tables, "Place"), "*i32")
    kernel = "nsa_tutorial.kernels.triton.selected.backward:dkv_kernel"
    return lowering.stages(kernel, constants, types, arch=arch, **options)


def _types(dtype: str, *tensors: str) -> dict[str, str]:
    """Triton's types of the arguments: of `tensors` that have the dtype, and of those that have one
    type in every dtype."""
    always = {"LSE": "*fp32", "scale": "fp32", "scale_log2": "fp32"}
    return dict.fromkeys(tensors, POINTERS[dtype]) | always


def excerpt(
    language: str, *words: str, name: str | None = None, arch: str = "sm_90", lines: int = 1
) -> Listing:
    """The first `lines` lines that hold each of `words` in what a kernel becomes in fp16, and how
    many there are: a place to start reading. Long lines are cut.

    Args:
        language: `"tilelang"` for CUDA C++, `"triton"` for PTX.
        words: names of functions or instructions.
        name: of a kernel of chapter 09, or `"dkv"`, chapter 13's; None is the forward of chapters
            10 and 11.
        arch, lines: the GPU, and how many lines of each to show.

    Returns:
        A listing; where the language is not installed, one that says so in a sentence.
    """
    here, is_triton = environment.detect(), language == "triton"
    if missing := here.why_not(language, here.device if is_triton else "cuda"):
        return Listing(missing, "")
    text = _ptx(name, arch) if is_triton else _cuda(name, arch)
    source = [" ".join(line.split()) for line in text.splitlines()]
    found = {word: [line for line in source if word in line] for word in words}
    counts = ", ".join(
        f"{min(lines, len(hits))} of {len(hits)} with {word}" for word, hits in found.items()
    )
    shown = "\n".join(line for hits in found.values() for line in hits[:lines])
    cut = (x if len(x) <= 100 else x[:99] + "…" for x in shown.replace(" {", "\n    {").split("\n"))
    told = "PTX from Triton" if is_triton else "CUDA C++ from TileLang"
    title = f"{told} for {arch}, {len(source)} lines. Shown: {counts}"
    return Listing(title, "\n".join(cut), "text" if is_triton else "cuda")


def _ptx(name: str | None, arch: str) -> str:
    if name == "dkv":
        return dkv_stages(arch)["ptx"]
    return (basic_stages(name, arch) if name else triton_stages(arch))["ptx"]


def _cuda(name: str | None, arch: str) -> str:
    if name == "dkv":
        return dkv_cuda(arch)
    return basic_cuda(name, arch) if name else tilelang_cuda(arch)
