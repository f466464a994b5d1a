"""A window of w is exactly w keys, the query's own among them, all of the query's sequence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from branches import LargestStorage, Shape, assert_attention, assert_blind_to
from places import in_dtypes, places_of, product, skip_unless_runs
from torch import Tensor

from nsa_tutorial import ops

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = {
    "two KV heads, odd window": Shape(B=2),
    "window of one": Shape(window=1),
    "window of two": Shape(window=2, D=5, DV=3),
    "window as long as the sequence": Shape(window=37),
    "window longer than the sequence": Shape(window=1000),
    "more keys than queries": Shape(B=2, N=9, M=40, window=7),
    "decoding: one query": Shape(B=2, N=1, M=40, window=7),
    "window longer than a tile": Shape(N=290, M=301, D=8, DV=4, window=150),
    "tile longer than the window": Shape(N=290, M=290, D=8, DV=4, window=20),
    "packed, one empty": Shape(N=50, M=50, window=9, cu=(0, 7, 7, 12, 50)),
    "packed over several tiles": Shape(N=270, M=270, D=8, DV=4, window=40, cu=(0, 120, 131, 270)),
    "large scores": Shape(magnitude=60.0),
    "one KV head, G 16": Shape(H=1, G=16, D=16, DV=16),
}


def attend(
    shape: Shape, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    return ops.sliding_window_attention(
        q, k, v, window_size=shape.window, scale=scale, cu_seqlens=shape.offsets, return_lse=True
    )


@pytest.mark.parametrize(("shape", "dtype"), in_dtypes(SHAPES))
def test_sliding_window(shape: Shape, dtype: torch.dtype) -> None:
    q, k, v = shape.make(dtype)
    mask = shape.over_heads(shape.seen_keys(shape.window))
    assert_attention(*attend(shape, q, k, v), q, k, v, mask)
    if dtype == torch.float64:
        assert_attention(*attend(shape, q, k, v, 0.71), q, k, v, mask, 0.71)


# On the CPU a case costs what it compiles, a TileLang kernel for each H, G, D, DV and dtype,
# and its rows in Triton's interpreter: few of both. Both kernels take 64 keys at a time.
KERNEL_SHAPES = SHAPES | {
    "two KV heads, odd window": Shape(B=2, N=6, M=17),
    "window of one": Shape(N=5, M=37, window=1),
    "window as long as the sequence": Shape(N=9, M=37, window=37),
    "window longer than the sequence": Shape(N=9, M=9, window=1000),
    "decoding: one query": Shape(B=2, N=1, M=40, window=7),
    "window of two tiles and a bit": Shape(N=5, M=301, window=131),
    "packed, one empty": Shape(N=24, M=24, window=9, cu=(0, 3, 3, 5, 24)),
    "packed, a window of tiles": Shape(N=150, M=150, D=8, DV=4, window=70, cu=(0, 131, 150)),
    "large scores": Shape(N=9, magnitude=60.0),
    "window of two, odd widths": Shape(N=9, window=2, D=5, DV=3),
    "one KV head, G 16": Shape(N=9, H=1, G=16, D=16, DV=16),
    "G 20, widths 64": Shape(N=5, H=1, G=20, D=64, DV=64, window=33),
}
QUICK = {
    torch.float32: {
        "two KV heads, odd window",
        "window of one",
        "window as long as the sequence",
        "window longer than the sequence",
        "decoding: one query",
        "window of two tiles and a bit",
        "packed, one empty",
        "large scores",
        "G 20, widths 64",
    },
    torch.float16: {"two KV heads, odd window"},
}
# TileLang compiles kernels for every group and width
SLOW = {"tilelang": QUICK[torch.float32] - {"G 20, widths 64"}}
kernel_lanes = places_of(["tilelang", "triton"])


@product("shape", KERNEL_SHAPES, ["tilelang", "triton"], QUICK, slow=SLOW)
def test_kernels(shape: Shape, dtype: torch.dtype, backend: str, device: str) -> None:
    skip_unless_runs(backend, device, dtype)
    if backend == "triton" and device == "cpu" and shape.N > 100:
        pytest.skip("the interpreter would take its time")
    if dtype != torch.float32 and shape.magnitude > 1:
        pytest.skip(
            "rounded scores of this size decide alone: the reference differs from the truth as much"
        )
    inputs = [x.to(device) for x in shape.make(dtype)]
    offsets = None if shape.cu is None else shape.offsets.to(device)
    o, lse = ops.sliding_window_attention(
        *inputs, window_size=shape.window, cu_seqlens=offsets, return_lse=True, backend=backend
    )
    mask = shape.over_heads(shape.seen_keys(shape.window)).to(device)
    assert_attention(o, lse, *inputs, mask)


@places_of(["reference", "tilelang", "triton"])
def test_exactly_w_keys(backend: str, device: str) -> None:
    """Scores of zero: the log-sum-exp counts the keys."""
    skip_unless_runs(backend, device)
    q, k, v = (torch.zeros_like(x, device=device) for x in Shape(N=9, M=9).make())
    _, lse = ops.sliding_window_attention(q, k, v, window_size=4, return_lse=True, backend=backend)
    expected = torch.tensor([1, 2, 3, 4, 4, 4, 4, 4, 4], device=device)[:, None]
    assert (lse.exp().round() == expected).all()


@kernel_lanes
def test_kernels_read_nothing_outside_the_window(backend: str, device: str) -> None:
    """NaN in every key and value that no query's window holds, and in the future: 0 * NaN would
    show it."""
    skip_unless_runs(backend, device)
    shape = Shape(N=3, M=90, window=20)
    q, k, v = (x.to(device) for x in shape.make())
    for position in range(3):
        hidden = torch.ones(90, dtype=torch.bool, device=device)
        hidden[87 + position - 19 : 87 + position + 1] = False
        spoiled = [x.masked_fill(hidden[:, None, None], torch.nan) for x in (k, v)]
        o, _ = ops.sliding_window_attention(
            q, *spoiled, window_size=20, return_lse=True, backend=backend
        )
        right = ops.sliding_window_attention(q, k, v, window_size=20)
        assert torch.allclose(o[:, position], right[:, position], atol=1e-5)


@pytest.mark.parametrize("window", [45, 46, 10_000])
def test_a_window_over_everything_is_dense_attention(window: int) -> None:
    shape = Shape(B=2, N=45, M=45, window=window)
    q, k, v = shape.make()
    o, _ = attend(shape, q, k, v)
    dense = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    assert torch.allclose(o, dense.transpose(1, 2), atol=1e-5)


@pytest.mark.parametrize("N", [40, 290], ids=["one tile", "several tiles"])
def test_nothing_leaks_into_the_window(N: int) -> None:
    """Neither from the future nor from before."""
    shape = Shape(N=N, M=N)
    inputs = list(shape.make())
    later, before = slice(21, None), slice(0, 16)
    assert_blind_to(
        lambda *x: attend(shape, *x), inputs, [(0, later), (1, later), (2, later)], slice(0, 21)
    )
    assert_blind_to(
        lambda *x: attend(shape, *x), inputs, [(1, before), (2, before)], slice(20, None)
    )
    packed = replace(shape, cu=(0, 19, N))
    assert_blind_to(
        lambda *x: attend(packed, *x),
        inputs,
        [(1, slice(0, 19)), (2, slice(0, 19))],
        slice(19, None),
    )


def test_packed_sequences_are_separate_calls() -> None:
    shape = SHAPES["packed, one empty"]
    q, k, v = shape.make()
    o, lse = attend(shape, q, k, v)
    for start, end in ((0, 7), (7, 12), (12, 50)):
        part = replace(shape, N=end - start, M=end - start, cu=None)
        o_part, lse_part = attend(part, *(x[:, start:end] for x in (q, k, v)))
        assert torch.allclose(o[:, start:end], o_part, atol=1e-6)
        assert torch.allclose(lse[:, start:end], lse_part, atol=1e-6)


SMALL = Shape(N=5, M=7, G=2, D=3, DV=2, window=3)


@pytest.mark.parametrize(
    "shape",
    [SMALL, replace(SMALL, N=7, G=1, cu=(0, 2, 7))],
    ids=["more keys than queries", "packed"],
)
def test_gradients(shape: Shape) -> None:
    inputs = [x.requires_grad_() for x in shape.make(torch.float64)]
    assert torch.autograd.gradcheck(lambda *x: attend(shape, *x), inputs, fast_mode=True)


def test_strided_inputs() -> None:
    shape = Shape(B=2)
    inputs = shape.make()
    strided = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in inputs]
    assert not any(x.is_contiguous() for x in strided)
    assert torch.allclose(attend(shape, *inputs)[0], attend(shape, *strided)[0], atol=1e-6)


@pytest.mark.parametrize(("B", "N"), [(0, 9), (1, 0)], ids=["no sequence", "no query"])
def test_nothing_to_do(B: int, N: int) -> None:
    shape = Shape(B=B, N=N, M=9)
    o, lse = attend(shape, *shape.make())
    assert (o.shape, lse.shape) == ((B, N, 6, 40), (B, N, 6))


def test_scores_of_one_tile_exist_at_a_time(watch) -> None:
    """Per head tile * (tile + w - 1) scores, whatever N is."""
    shape = Shape(N=2048, M=2048, H=1, G=4, D=2, DV=2, window=100)
    inputs = shape.make()
    with torch.no_grad(), watch(LargestStorage()) as largest:
        attend(shape, *inputs)
    assert largest.bytes <= 4 * 128 * (128 + 100 - 1) * 4
