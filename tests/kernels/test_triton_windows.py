"""Windows by tiles of queries in Triton: outputs and gradients within the budget, whatever a tile
holds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from branches import Shape, assert_attention
from places import product, skip_unless_runs
from torch import Tensor

from nsa_tutorial.kernels import triton_windows
from nsa_tutorial.kernels.triton_tiles import SHARED_MEMORY, tile_sizes
from nsa_tutorial.sparse.selected_attention import QueryRows, query_rows

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, in the interpreter
]
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])

SMALL = Shape(N=40, M=40, H=2, G=3, D=16, DV=16, window=9)
SHAPES = {
    "G 1": replace(SMALL, G=1),
    "G 3, steps without a mask": replace(SMALL, N=75, M=90, H=1, window=70),
    "G 16": replace(SMALL, N=5, M=90, H=1, G=16, window=64),
    "G 20, a batch": replace(SMALL, B=2, N=5, M=80, H=1, G=20, window=70),
    "G 33, more than a tile": replace(SMALL, N=3, M=80, G=33, window=66),
    "odd widths": replace(SMALL, N=9, D=24, DV=80, window=7),
    "wide keys": replace(SMALL, N=9, M=45, H=1, D=192, DV=128, window=35),
    "as wide as can be": replace(SMALL, N=9, M=45, H=1, D=256, DV=256, window=35),
    "window of one": replace(SMALL, window=1),
    "window longer than the sequence": replace(SMALL, window=1000),
    "a long window": replace(SMALL, N=9, M=301, H=1, window=131),
    "one query, a batch": replace(SMALL, B=3, N=1, M=70),
    "a batch of odd lengths": replace(SMALL, B=2, N=9, M=50),
    "packed, one empty": replace(SMALL, cu=(0, 3, 3, 5, 40)),
    "packed, long windows": replace(SMALL, N=150, M=150, H=1, G=1, window=70, cu=(0, 131, 150)),
    "large scores": replace(SMALL, N=9, magnitude=60.0),
}
QUICK = {
    torch.float32: SHAPES.keys() - {"as wide as can be"},
    torch.float16: {"G 16", "G 33, more than a tile", "packed, one empty"},
}
on_shapes = product("shape", SHAPES, ["triton"], QUICK)


def arguments(
    shape: Shape, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[list[Tensor], QueryRows, dict[str, float]]:
    """`q, k, v`, the rows, and the sizes of the call."""
    inputs = [x.to(device) for x in shape.make(dtype)]
    cu_seqlens = None if shape.cu is None else shape.offsets.to(device)
    place = {"causal": True, "cu_seqlens": cu_seqlens, "device": torch.device(device)}
    rows = query_rows(shape.B, shape.N, shape.M, **place)
    return inputs, rows, {"window_size": shape.window, "scale": shape.D**-0.5}


def mask_of(shape: Shape, device: str = "cpu") -> Tensor:
    return shape.over_heads(shape.seen_keys(shape.window)).to(device)


# -- outputs --


@on_shapes
def test_outputs(shape: Shape, dtype: torch.dtype, backend: str, device: str) -> None:
    skip_unless_runs(backend, device, dtype)
    if dtype != torch.float32 and shape.magnitude > 1:
        pytest.skip("rounded scores of this size decide alone")
    inputs, rows, sizes = arguments(shape, dtype, device)
    o, lse = triton_windows.launch(*inputs, rows, **sizes)
    assert_attention(o, lse, *inputs, mask_of(shape, device))


@devices
@pytest.mark.parametrize("window", [1, 31, 32, 33, 64, 100])
@pytest.mark.parametrize("tile", [(16, 16, 16), (32, 32, 16), (64, 16, 32)], ids=str)
def test_any_tile_and_step(tile: tuple[int, int, int], window: int, device: str) -> None:
    """A tile may be longer than the window or shorter, and steps at the ends longer than those
    between."""
    skip_unless_runs("triton", device)
    shape = replace(SMALL, N=30, M=110, H=1, window=window)
    inputs, rows, sizes = arguments(shape, device=device)
    options = dict(zip(("BQ", "BT", "BE"), tile, strict=True))
    o, lse = triton_windows.launch(*inputs, rows, **sizes, **options)
    assert_attention(o, lse, *inputs, mask_of(shape, device))


@devices
def test_outputs_in_their_place(device: str) -> None:
    """Written where they belong, and nowhere else."""
    skip_unless_runs("triton", device)
    inputs, rows, sizes = arguments(SMALL, device=device)
    o, lse = triton_windows.launch(*inputs, rows, **sizes)
    both_o, both_lse = (torch.full((2, *x.shape), 7.0, device=device) for x in (o, lse))
    triton_windows.launch(*inputs, rows, **sizes, out=(both_o[1], both_lse[1]))
    assert torch.equal(both_o[1], o)
    assert torch.equal(both_lse[1], lse)
    assert (both_o[0] == 7).all()
    assert (both_lse[0] == 7).all()


@pytest.mark.parametrize(("B", "N"), [(0, 9), (1, 0)], ids=["no sequence", "no query"])
def test_nothing_to_do(B: int, N: int) -> None:
    shape = replace(SMALL, B=B, N=N)
    inputs, rows, sizes = arguments(shape)
    o, lse = triton_windows.launch(*inputs, rows, **sizes)
    assert (o.shape, lse.shape) == ((B, N, 6, 16), (B, N, 6))


# What one query sees and its neighbours in the tile do not: at an end, or in another sequence.
NEIGHBOURS = {
    "one sequence": replace(SMALL, N=12),
    "steps without a mask": replace(SMALL, N=8, M=90, H=1, window=70),
    "packed": replace(SMALL, cu=(0, 17, 40)),
}
neighbours = pytest.mark.parametrize("shape", NEIGHBOURS.values(), ids=NEIGHBOURS.keys())


@devices
@neighbours
def test_hidden_numbers_stay_hidden(shape: Shape, device: str) -> None:
    """NaN in each key, infinity in each value, that a query does not see: it gives the same to the
    bit."""
    skip_unless_runs("triton", device)
    (q, k, v), rows, sizes = arguments(shape, device=device)
    o, lse = triton_windows.launch(q, k, v, rows, **sizes)
    mask = shape.seen_keys(shape.window).to(device)
    for query in (0, shape.N // 2, shape.N - 1):
        hidden = ~mask[query][None, :, None, None]
        spoiled = k.masked_fill(hidden, math.nan), v.masked_fill(hidden, math.inf)
        o_after, lse_after = triton_windows.launch(q, *spoiled, rows, **sizes)
        assert torch.equal(o[:, query], o_after[:, query])
        assert torch.equal(lse[:, query], lse_after[:, query])


@devices
@neighbours
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf], ids=str)
def test_a_value_spoils_its_channel(number: float, shape: Shape, device: str) -> None:
    """Of those that see it, and of no others."""
    skip_unless_runs("triton", device)
    (q, k, v), rows, sizes = arguments(shape, device=device)
    o, lse = triton_windows.launch(q, k, v, rows, **sizes)
    key = shape.M - shape.N + 4
    v[0, key, 0, 5] = number
    o_after, lse_after = triton_windows.launch(q, k, v, rows, **sizes)
    sees = shape.seen_keys(shape.window)[:, key].to(device)
    is_spoiled = torch.zeros_like(o, dtype=torch.bool)
    is_spoiled[:, sees, : shape.G, 5] = True
    assert torch.equal(~o_after.isfinite(), is_spoiled)
    assert torch.equal(o_after[~is_spoiled], o[~is_spoiled])
    assert torch.equal(lse_after, lse)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("D", [16, 128, 192, 256])
@pytest.mark.parametrize("G", [1, 16, 64])
def test_what_a_program_holds_fits(G: int, D: int, itemsize: int) -> None:
    options = triton_windows.window_options(G, D, D, itemsize)
    width = tile_sizes(G, D, D)["DT"] * itemsize
    rows = options["BQ"] + 2 * options["num_stages"] * options["BT"]
    assert rows * width <= SHARED_MEMORY
    assert 16 <= options["BE"] <= options["BT"]
