"""The Triton kernels of an indexer's choice become PTX, and what a program holds fits."""

from __future__ import annotations

import pytest

from nsa_tutorial.kernels.tables import tiles
from nsa_tutorial.kernels.triton.choice.index_launch import index_options
from nsa_tutorial.runtime import environment, lowering
from nsa_tutorial.runtime.shared_memory import SHARED_MEMORY

CHOICE = "nsa_tutorial.kernels.triton.choice"
INT32 = ("FirstKey", "NumVisible", "TileStart", "Position", "BlockIndices")
TYPES = dict.fromkeys(INT32, "*i32") | {"Scores": "*fp32", "W": "*fp32"}
SHAPES = {  # dtype, J, DI, BS, with weights
    "DSA": ("bf16", 64, 128, 1, True),
    "MSA": ("bf16", 1, 128, 128, False),
    "blocks of no step": ("fp16", 3, 80, 200, True),
    "fp32": ("fp32", 2, 24, 8, True),
}


def request(dtype: str, J: int, DI: int, BS: int, has_w: bool) -> tuple:
    options = index_options(DI, 4 if dtype == "fp32" else 2)
    sides = {"BQ": options.pop("BQ"), "BT": options.pop("BT"), "DT": 1 << (DI - 1).bit_length()}
    constants = {"J": J, "DI": DI, "BS": BS, "HAS_W": has_w, **sides}
    constants["PART"] = tiles.part_size(BS, sides["BT"])
    types = TYPES | {"Q": f"*{dtype}", "K": f"*{dtype}"}
    return lowering.request(f"{CHOICE}.index:index_kernel", constants, types, **options)


@pytest.mark.skipif(environment.detect().triton is None, reason="triton is not installed")
@pytest.mark.exhaustive
def test_kernels_become_ptx() -> None:
    """Half precision on the tensor cores, fp32 not."""
    pick = f"{CHOICE}.pick_many:pick_many_kernel"
    asked = [request(*SHAPES[name]) for name in SHAPES]
    asked.append(lowering.request(pick, {"BS": 1, "BN": 4096}, TYPES, num_warps=8))
    *scores, _ = lowering.all_stages(asked)
    for name, stages in zip(SHAPES, scores, strict=True):
        assert ("wgmma" in stages["ptx"]) == (name != "fp32")


@pytest.mark.parametrize("DI", [8, 128, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_what_a_program_holds_fits(DI: int, itemsize: int) -> None:
    options = index_options(DI, itemsize)
    DT = max(16, 1 << (DI - 1).bit_length())
    held = (options["num_stages"] * options["BQ"] + options["BT"]) * DT * itemsize
    assert held <= SHARED_MEMORY
