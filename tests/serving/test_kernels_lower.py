"""The Triton kernels of decoding become PTX: with pages and without, in every dtype."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from nsa_tutorial.kernels.triton import decoding
from nsa_tutorial.runtime import environment, lowering

FOLDER = Path(decoding.__file__).parent
KERNELS = {
    "summaries_and_window_kernel": "attend", "lists_kernel": "attend", "mass_kernel": "merge",
    "merge_kernel": "merge", "tokens_kernel": "write", "summaries_kernel": "write",
}  # fmt: skip
FP32 = ("Partials", "PartialLSE", "Scores", "Mass")
INT32 = ("NumVisible", "Position", "Lengths", "Table", "BlockIndices")
CONSTANTS = {
    "G": 16, "D": 128, "DV": 128, "GT": 16, "DT": 128, "DVT": 128, "BT": 64, "BS": 64,
    "LENGTH": 32, "STRIDE": 16, "PAGE": 4096, "IS_PAGED": False, "SPLITS": 4, "WINDOW_SPLITS": 2,
    "PC": 4, "PW": 2, "PL": 8, "PT": 4, "PCT": 4, "PWT": 2, "PLT": 8, "BP": 8, "BC": 256,
    "NK": 512, "NV": 512, "BLOCK": 512,
}  # fmt: skip
OTHERS = {
    "fp32": {"D": 80, "DV": 256, "DVT": 256, "BT": 16, "BS": 24, "IS_PAGED": True, "PAGE": 96},
    "fp16": {"G": 3, "GT": 16, "IS_PAGED": True, "PAGE": 256, "PC": 1, "PT": 1, "PCT": 1, "PW": 0},
}
DTYPES = {"bf16": {}, **OTHERS}
QUICK = {  # with every run: each kernel, each dtype, and the largest one with pages and without
    "bf16": ("summaries_and_window_kernel", "merge_kernel"),
    "fp32": ("tokens_kernel", "mass_kernel"),
    "fp16": ("summaries_and_window_kernel", "lists_kernel", "summaries_kernel"),
}


@pytest.mark.skipif(environment.detect().triton is None, reason="triton is not installed")
@pytest.mark.parametrize(
    "is_quick", [True, pytest.param(False, marks=pytest.mark.exhaustive)], ids=["some", "others"]
)
def test_kernels_become_ptx(is_quick: bool) -> None:
    requests = []
    for dtype, changes in DTYPES.items():
        for kernel, module in KERNELS.items():
            if (kernel in QUICK[dtype]) != is_quick:
                continue
            body = ast.parse((FOLDER / f"{module}.py").read_text()).body
            (found,) = [f for f in body if getattr(f, "name", "") == kernel]
            constants, types = {}, {}
            for arg in found.args.args:
                if arg.annotation is not None:
                    constants[arg.arg] = {**CONSTANTS, **changes}[arg.arg]
                elif arg.arg[0].isupper() and arg.arg not in ("H", "P", "S", "NC"):
                    types[arg.arg] = "*fp32" if arg.arg in FP32 else f"*{dtype}"
                    types[arg.arg] = "*i32" if arg.arg in INT32 else types[arg.arg]
            types |= {"scale": "fp32", "scale_log2": "fp32"}
            name = f"nsa_tutorial.kernels.triton.decoding.{module}:{kernel}"
            requests.append(lowering.request(name, constants, types, num_warps=4, num_stages=2))
    for stages in lowering.all_stages(requests):
        assert ".target sm_90" in stages["ptx"]
