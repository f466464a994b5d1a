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

from nsa_tutorial.kernels.triton import launch_options
from nsa_tutorial.kernels.triton.launch_options import SHARED_MEMORY, tile_sizes
from nsa_tutorial.kernels.triton.window import launch
from nsa_tutorial.sparse.selected_attention import QueryRows, masked_attention, query_rows

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, in the interpreter
]
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])

SMALL = Shape(N=20, M=30, H=2, G=3, D=16, DV=16, window=9)
SHAPES = {
    "G 1": replace(SMALL, G=1),
    "G 3, steps without a mask": replace(SMALL, N=35, M=90, H=1, window=70),
    "G 16": replace(SMALL, N=5, M=90, H=1, G=16, window=64),
    "G 20, a batch": replace(SMALL, B=2, N=5, M=80, H=1, G=20, window=70),
    "G 33, more than a tile": replace(SMALL, N=3, M=80, H=1, G=33, window=66),
    "odd widths": replace(SMALL, N=9, D=24, DV=80, window=7),
    "wide keys": replace(SMALL, N=9, M=45, H=1, D=192, DV=128, window=35),
    "as wide as can be": replace(SMALL, N=9, M=45, H=1, D=256, DV=256, window=35),
    "window of one": replace(SMALL, N=9, window=1),
    "window longer than the sequence": replace(SMALL, window=1000),
    "a long window": replace(SMALL, N=9, M=301, H=1, window=131),
    "one query, a batch": replace(SMALL, B=3, N=1, M=70),
    "a batch of odd lengths": replace(SMALL, B=2, N=9, M=50),
    "packed, one empty": replace(SMALL, N=30, cu=(0, 3, 3, 5, 30)),
    "packed, long windows": replace(SMALL, N=150, M=150, H=1, G=1, window=70, cu=(0, 131, 150)),
}
LARGE = {"large scores": replace(SMALL, N=9, magnitude=60.0)}
QUICK = {
    "G 3, steps without a mask",
    "G 20, a batch",
    "G 33, more than a tile",
    "wide keys",
    "window of one",
    "window longer than the sequence",
    "one query, a batch",
    "packed, one empty",
}


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


@product(
    "shape", SHAPES | LARGE, ["triton"],
    {torch.float32: QUICK | {"large scores"}, torch.float16: ["G 20, a batch"]},
)  # fmt: skip
def test_outputs(shape: Shape, dtype: torch.dtype, backend: str, device: str) -> None:
    skip_unless_runs(backend, device, dtype)
    if dtype != torch.float32 and shape.magnitude > 1:
        pytest.skip("rounded scores of this size decide alone")
    inputs, rows, sizes = arguments(shape, dtype, device)
    o, lse = launch.window_forward(*inputs, rows, **sizes)
    assert_attention(o, lse, *inputs, mask_of(shape, device))


@devices
@pytest.mark.parametrize(
    ("window", "tile"),
    [(1, (64, 16, 32)), (31, (32, 32, 16)), (32, (16, 16, 16)), (33, (32, 32, 16)),
     (64, (16, 16, 16)), (100, (64, 16, 32))],
    ids=str,
)  # fmt: skip
def test_any_tile_and_step(window: int, tile: tuple[int, int, int], device: str) -> None:
    """A tile may be longer than the window or shorter, and steps at the ends longer than those
    between."""
    skip_unless_runs("triton", device)
    shape = replace(SMALL, N=25, M=110, H=1, window=window)
    inputs, rows, sizes = arguments(shape, device=device)
    options = dict(zip(("BQ", "BT", "BE"), tile, strict=True))
    o, lse = launch.window_forward(*inputs, rows, **sizes, **options)
    assert_attention(o, lse, *inputs, mask_of(shape, device))


@devices
def test_outputs_in_their_place(device: str) -> None:
    """Written where they belong, and nowhere else."""
    skip_unless_runs("triton", device)
    inputs, rows, sizes = arguments(SMALL, device=device)
    o, lse = launch.window_forward(*inputs, rows, **sizes)
    both_o, both_lse = (torch.full((2, *x.shape), 7.0, device=device) for x in (o, lse))
    launch.window_forward(*inputs, rows, **sizes, out=(both_o[1], both_lse[1]))
    assert torch.equal(both_o[1], o)
    assert torch.equal(both_lse[1], lse)
    assert (both_o[0] == 7).all()
    assert (both_lse[0] == 7).all()


@pytest.mark.parametrize(("B", "N"), [(0, 9), (1, 0)], ids=["no sequence", "no query"])
def test_nothing_to_do(B: int, N: int) -> None:
    shape = replace(SMALL, B=B, N=N)
    inputs, rows, sizes = arguments(shape)
    o, lse = launch.window_forward(*inputs, rows, **sizes)
    assert (o.shape, lse.shape) == ((B, N, 6, 16), (B, N, 6))


# What one query sees and its neighbours in the tile do not: at an end, or in another sequence.
NEIGHBOURS = {
    "one sequence": replace(SMALL, N=12),
    "steps without a mask": replace(SMALL, N=8, M=90, H=1, window=70),
    "packed": replace(SMALL, N=30, cu=(0, 17, 30)),
}
neighbours = pytest.mark.parametrize("shape", NEIGHBOURS.values(), ids=NEIGHBOURS.keys())


def beside_neighbours(name: str, *values: object) -> pytest.MarkDecorator:
    """A test's `shape` and `name`: each of the neighbours with one of the values."""
    params = [
        pytest.param(shape, value, id=f"{key}-{value}")
        for (key, shape), value in zip(NEIGHBOURS.items(), values, strict=True)
    ]
    return pytest.mark.parametrize(("shape", name), params)


@devices
@neighbours
def test_hidden_numbers_stay_hidden(shape: Shape, device: str) -> None:
    """NaN in each key, infinity in each value, that a query does not see: it gives the same to the
    bit."""
    skip_unless_runs("triton", device)
    (q, k, v), rows, sizes = arguments(shape, device=device)
    o, lse = launch.window_forward(q, k, v, rows, **sizes)
    mask = shape.seen_keys(shape.window).to(device)
    for query in (shape.N // 2, shape.N - 1):
        hidden = ~mask[query][None, :, None, None]
        spoiled = k.masked_fill(hidden, math.nan), v.masked_fill(hidden, math.inf)
        o_after, lse_after = launch.window_forward(q, *spoiled, rows, **sizes)
        assert torch.equal(o[:, query], o_after[:, query])
        assert torch.equal(lse[:, query], lse_after[:, query])


@devices
@beside_neighbours("number", math.nan, math.inf, -math.inf)
def test_a_value_spoils_its_channel(shape: Shape, number: float, device: str) -> None:
    """Of those that see it, and of no others."""
    skip_unless_runs("triton", device)
    (q, k, v), rows, sizes = arguments(shape, device=device)
    o, lse = launch.window_forward(q, k, v, rows, **sizes)
    key = shape.M - shape.N + 4
    v[0, key, 0, 5] = number
    o_after, lse_after = launch.window_forward(q, k, v, rows, **sizes)
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
    options = launch_options.window_options(G, D, D, itemsize)
    width = tile_sizes(G, D, D)["DT"] * itemsize
    rows = options["BQ"] + 2 * options["num_stages"] * options["BT"]
    assert rows * width <= SHARED_MEMORY
    assert 16 <= options["BE"] <= options["BT"]


# -- gradients --


def gradients_of(
    inputs: list[Tensor], mask: Tensor, scale: float, d_o: Tensor, d_lse: Tensor, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Those of plain PyTorch in `dtype`."""
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    o, lse = masked_attention(*leaves, mask, scale)
    return torch.autograd.grad((o, lse), leaves, (d_o.to(o.dtype), d_lse.to(lse.dtype)))


def backward(
    shape: Shape, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[list[Tensor], QueryRows, dict[str, float]]:
    """The arguments of `window_backward`; no loss asks for some rows, and none for some heads."""
    inputs, rows, sizes = arguments(shape, dtype, device)
    o, lse = launch.window_forward(*inputs, rows, **sizes)
    g = torch.Generator().manual_seed(1)
    d_o, d_lse = (torch.randn(x.shape, generator=g).to(x) for x in (o, lse))
    d_o[:, 5:7], d_lse[:, 5:7] = 0, 0
    d_o[:, :3, : shape.G], d_lse[:, :3, : shape.G] = 0, 0
    return [d_o, d_lse, *inputs, o, lse], rows, sizes


@product(
    "shape", SHAPES, ["triton"], {torch.float32: QUICK, torch.float16: ["packed, one empty"]}
)  # fmt: skip
def test_gradients(shape: Shape, dtype: torch.dtype, backend: str, device: str) -> None:
    skip_unless_runs(backend, device, dtype)
    tensors, rows, sizes = backward(shape, dtype, device)
    assert_gradients(shape, launch.window_backward(*tensors, rows, **sizes), tensors)


def assert_gradients(shape: Shape, found: tuple[Tensor, ...], tensors: list[Tensor]) -> None:
    """At most twice the error of plain PyTorch, plus a millionth of the largest gradient."""
    d_o, d_lse, *inputs = tensors[:5]
    dtype, device = d_o.dtype, d_o.device.type
    call = (inputs, mask_of(shape, device), shape.D**-0.5, d_o, d_lse)
    truth, plain = gradients_of(*call, torch.float64), gradients_of(*call, dtype)
    for name, a, b, c in zip("qkv", truth, plain, found, strict=True):
        assert c.dtype == dtype
        budget = 2 * (b.double() - a).abs().max() + 1e-6 * a.abs().max() + 1e-6
        error = (c.double() - a).abs().max()
        assert error <= budget, f"gradient of {name}: {error:.2e} over {budget:.2e}"


@devices
@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        (replace(SMALL, N=24, M=40, H=1, window=20), (32, 16)),
        (replace(SMALL, N=5, M=70, H=1, G=20, window=66), (16, 16)),
        (replace(SMALL, N=24, M=24, H=1, G=1, window=9, cu=(0, 11, 11, 24)), (16, 64)),
    ],
    ids=["one sequence", "G 20", "packed"],
)
def test_gradients_of_any_tile_and_step(shape: Shape, tile: tuple[int, int], device: str) -> None:
    """Rows of a step may begin in the middle of a group, and may be fewer than a group has."""
    skip_unless_runs("triton", device)
    tensors, rows, sizes = backward(shape, device=device)
    call = launch.WindowCall.of(*tensors, rows, **sizes)
    d_q, d_k, d_v = (torch.empty_like(x) for x in tensors[2:5])
    launch.gradient_of_queries(call, d_q, BQ=tile[0], BT=tile[1], BE=16)
    launch.gradients_of_keys_and_values(call, d_k, d_v, BT=tile[0], BR=tile[1])
    assert_gradients(shape, (d_q, d_k, d_v), tensors)


@devices
def test_gradients_are_added(device: str) -> None:
    """To what stands in `out`, also where nobody sees a key."""
    skip_unless_runs("triton", device)
    tensors, rows, sizes = backward(replace(SMALL, N=9), device=device)
    right = launch.window_backward(*tensors, rows, **sizes)
    out = tuple(torch.full_like(x, 2.0) for x in tensors[2:5])
    found = launch.window_backward(*tensors, rows, **sizes, out=out)
    for x, place, expected in zip(found, out, right, strict=True):
        assert x is place
        torch.testing.assert_close(x, expected + 2)
    assert (right[1][:, :13] == 0).all(), "windows begin at key 13: the case is none"


@pytest.mark.parametrize(("B", "N"), [(0, 9), (1, 0)], ids=["no sequence", "no query"])
def test_gradients_of_nothing(B: int, N: int) -> None:
    tensors, rows, sizes = backward(replace(SMALL, B=B, N=N))
    for x, d in zip(tensors[2:5], launch.window_backward(*tensors, rows, **sizes), strict=True):
        assert d.shape == x.shape
        assert (d == 0).all()


@devices
@beside_neighbours("where", "q", "k", "v")
def test_gradients_of_what_is_not_spoiled(shape: Shape, where: str, device: str) -> None:
    """NaN in a query, a key or a value: rows that do not see it keep their gradient to the bit, and
    so do, but for the order of their sums, the keys that only such rows see."""
    skip_unless_runs("triton", device)

    def gradients(inputs: list[Tensor]) -> tuple[Tensor, ...]:
        o, lse = launch.window_forward(*inputs, rows, **sizes)
        d = torch.ones_like(o), torch.ones_like(lse)
        return launch.window_backward(*d, *inputs, o, lse, rows, **sizes)

    inputs, rows, sizes = arguments(shape, device=device)
    clean = gradients(inputs)
    mask, query, key = shape.seen_keys(shape.window).to(device), 3, shape.M - shape.N + 2
    inputs["qkv".index(where)][0, query if where == "q" else key, 0, 1] = math.nan
    d_q, d_k, d_v = gradients(inputs)
    is_spoiled = torch.arange(shape.N, device=device) == query if where == "q" else mask[:, key]
    is_touched = mask[is_spoiled].any(0)
    assert torch.equal(d_q[:, ~is_spoiled], clean[0][:, ~is_spoiled])
    assert not d_q[:, is_spoiled, 0].isfinite().all(-1).any()
    for d, right in ((d_k, clean[1]), (d_v, clean[2])):
        torch.testing.assert_close(d[:, ~is_touched], right[:, ~is_touched], atol=2e-6, rtol=1e-5)
        assert torch.equal(d[:, :, 1:], right[:, :, 1:])
    assert not d_k[:, is_touched, 0].isfinite().all(-1).any()


@devices
def test_a_row_that_no_loss_asks_for(device: str) -> None:
    """It has a gradient of 0, and gives none, whatever its query is."""
    skip_unless_runs("triton", device)
    tensors, rows, sizes = backward(SMALL, device=device)
    right = launch.window_backward(*tensors, rows, **sizes)
    tensors[2][:, 5] = math.nan
    tensors[5:] = launch.window_forward(*tensors[2:5], rows, **sizes)
    found = launch.window_backward(*tensors, rows, **sizes)
    assert (found[0][:, 5] == 0).all()
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


@pytest.mark.exhaustive
def test_long_sums_in_fp32() -> None:
    """The first query gives 2**24, where fp32 counts in twos; all others together give 17, but less
    than 1 a step. Added a step at a time, they would be lost."""
    skip_unless_runs("triton", "cpu")
    shape = replace(SMALL, N=40, M=40, H=1, G=16, window=40)
    (q, k, v), rows, sizes = arguments(shape)
    q = torch.zeros_like(q)  # so that query n gives each key 1 / (n + 1)
    o, lse = launch.window_forward(q, k, v, rows, **sizes)
    gift = torch.full((40,), 0.9 / 32)  # of a row to the first key; 32 rows are a step
    gift[0] = 2**24 / 16
    d_o = (gift * torch.arange(1, 41)).view(1, -1, 1, 1).expand_as(o)
    *_, d_v = launch.window_backward(d_o, torch.zeros_like(lse), q, k, v, o, lse, rows, **sizes)
    assert (d_v[0, 0].double() - 16 * gift.double().sum()).abs().max() < 12


@pytest.mark.parametrize("shape", NEIGHBOURS.values(), ids=NEIGHBOURS.keys())
def test_who_sees_a_tile(shape: Shape) -> None:
    """The run of queries that see some of it, and that of those who see all of it."""
    shape = replace(shape, B=1 if shape.cu else 2)
    _, rows, _ = arguments(shape)
    size, R = 8, shape.B * shape.N
    seen = torch.block_diag(*[shape.seen_keys(shape.window).float()] * shape.B).bool()
    lse2 = torch.zeros(R, 2, 3).index_fill_(0, torch.tensor([2, 3]), math.inf)
    runs, num_unread, row_end = launch.runs_of(
        rows, lse2, window_size=shape.window, tile_size=size, num_keys=shape.B * shape.M
    )
    for (first, whole, whole_stop, stop), tile in zip(
        runs.T.tolist(), seen.split(size, dim=1), strict=True
    ):
        assert tile.any(1).nonzero().flatten().tolist() == list(range(first, stop))
        expected = tile.all(1).nonzero().flatten().tolist()
        assert expected == list(range(max(first, whole), whole_stop))
    assert num_unread[:, 2:5].tolist() == [[0, 1, 2]] * 2
    assert torch.equal(row_end, rows.first_key + rows.num_visible)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("D", [16, 128, 192, 256])
@pytest.mark.parametrize("G", [1, 16, 64])
def test_what_a_program_of_the_backward_holds_fits(G: int, D: int, itemsize: int) -> None:
    width = 2 * tile_sizes(G, D, D)["DT"] * itemsize
    options = launch_options.window_dq_options(G, D, D, itemsize)
    assert (options["BQ"] + options["num_stages"] * options["BT"]) * width <= SHARED_MEMORY
    assert 16 <= options["BE"] <= options["BT"]
    options = launch_options.window_dkv_options(D, D, itemsize)
    assert (options["BT"] + options["num_stages"] * options["BR"]) * width <= SHARED_MEMORY


# -- on a GPU --


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_same_bits_every_time(dtype: torch.dtype) -> None:
    """And without waiting for the device."""
    shape = Shape(N=5000, M=5000, H=1, G=16, D=64, DV=64, window=300, cu=(0, 1100, 1100, 5000))
    tensors, rows, sizes = backward(shape, dtype, "cuda")

    def run() -> list[Tensor]:
        outputs = launch.window_forward(*tensors[2:5], rows, **sizes)
        return [*outputs, *launch.window_backward(*tensors, rows, **sizes)]

    first = run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        others = [run() for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.gpu
def test_queries_and_keys_past_32_bits() -> None:
    """2.3e9 numbers of queries, and of keys: the last queries are what they are alone."""
    for N, H, HQ in ((140_000, 4, 64), (140_000, 64, 64)):
        q = torch.randn(1, N, HQ, 256, dtype=torch.float16, device="cuda")
        k = torch.randn(1, N, H, 256, dtype=torch.float16, device="cuda")
        place = {"causal": True, "cu_seqlens": None, "device": q.device}
        sizes, last = {"window_size": 100, "scale": 1 / 16}, 200
        rows = query_rows(1, N, N, **place)
        o, lse = launch.window_forward(q, k, k, rows, **sizes)
        few = [x[:, -last:].contiguous() for x in (q, k, k)]
        few_rows = query_rows(1, last, last, **place)
        few += launch.window_forward(*few, few_rows, **sizes)
        d_o, d_lse = torch.randn_like(few[3]), torch.zeros_like(few[4])
        right = launch.window_backward(d_o, d_lse, *few, few_rows, **sizes)
        torch.testing.assert_close(o[:, -100:], few[3][:, -100:], atol=2e-3, rtol=0)
        torch.testing.assert_close(lse[:, -100:], few[4][:, -100:])
        d_o = torch.cat((torch.zeros_like(o[:, :-last]), d_o), 1)
        d_lse = torch.zeros_like(lse)
        found = launch.window_backward(d_o, d_lse, q, k, k, o, lse, rows, **sizes)
        for a, b in zip(found, right, strict=True):
            torch.testing.assert_close(a[:, -100:], b[:, -100:], atol=1e-2, rtol=1e-2)
