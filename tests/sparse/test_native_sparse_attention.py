"""Three branches, gated: each alone is its operator, all together are differentiable, causal, and a
layer that trains."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from branches import LargestStorage, Shape, assert_blind_to
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.layer import NativeSparseAttention, NativeSparseAttentionConfig
from nsa_tutorial.layer_parts import Compression, rotate
from nsa_tutorial.sparse import query_tiles
from nsa_tutorial.sparse.native_sparse_attention import gated_sum
from nsa_tutorial.sparse.selected_attention import (
    block_list,
    dense_mask,
    forward,
    masked_attention,
    query_rows,
)

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = {
    "nothing divides anything": Shape(B=2, N=60, M=60, BS=8),
    "more keys than queries": Shape(B=2, N=9, M=60, BS=8),
    "decoding: one query": Shape(B=2, N=1, M=60, BS=8),
    "several tiles of queries": Shape(N=150, M=161, D=8, DV=4),
    "fewer keys than a summary": Shape(N=5, M=6, BS=2),
    "packed": Shape(N=80, M=80, BS=4, cu=(0, 7, 7, 12, 80)),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


def options(shape: Shape) -> dict:
    return {
        "block_size": shape.BS, "window_size": shape.window, "length": shape.length,
        "stride": shape.stride,
        "cu_seqlens": shape.offsets,
    }  # fmt: skip


def gates_of(shape: Shape, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(2)
    return [
        torch.rand(shape.B, shape.N, shape.H * shape.G, generator=g).to(dtype) for _ in range(3)
    ]


def every_block(shape: Shape) -> Tensor:
    blocks = -(-shape.M // shape.BS)
    return torch.arange(blocks, dtype=torch.int32).expand(shape.B, shape.N, shape.H, blocks)


# -- the function --


@shapes
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=["float64", "float16"])
def test_it_is_the_sum_of_its_operators(dtype: torch.dtype, shape: Shape) -> None:
    """In fp64, masked attention by the contract's loops; in half precision, the operators
    themselves."""
    (q, k, v), gates = shape.make(dtype), gates_of(shape, dtype)
    o = ops.native_sparse_attention(q, k, v, *gates, block_counts=4, **options(shape))
    windows = {"length": shape.length, "stride": shape.stride, "cu_seqlens": shape.offsets}
    k_cmp, v_cmp = (ops.compress(x, **windows) for x in (k, v))
    ids = ops.select_blocks(q, k_cmp, top_n=4, block_size=shape.BS, num_keys=shape.M, **windows)
    masks = (
        (k_cmp, v_cmp, shape.over_heads(shape.seen_summaries())),
        (k, v, dense_mask(ids, shape.M, block_size=shape.BS, cu_seqlens=shape.offsets)),
        (k, v, shape.over_heads(shape.seen_keys(shape.window))),
    )
    truth = sum(
        gate.double()[..., None]
        * masked_attention(q.double(), keys.double(), values.double(), mask)[0]
        for gate, (keys, values, mask) in zip(gates, masks, strict=True)
    )
    assert o.dtype == dtype
    assert torch.allclose(o.double(), truth, atol=1e-12 if dtype == torch.float64 else 4e-3)


@shapes
def test_one_branch_at_a_time(shape: Shape) -> None:
    """Gates (0, 1, 0) are the selected branch alone, and a gate of None is a gate of 0."""
    (q, k, v), scale = shape.make(torch.float64), 0.3
    one, zero = (
        torch.ones(shape.B, shape.N, 6, dtype=torch.float64),
        torch.zeros(shape.B, shape.N, 6, dtype=torch.float64),
    )
    ids = every_block(shape)[..., ::2]
    windows = {"length": shape.length, "stride": shape.stride, "cu_seqlens": shape.offsets}
    k_cmp, v_cmp = (ops.compress(x, **windows) for x in (k, v))
    alone = (
        ops.compressed_attention(q, k_cmp, v_cmp, scale=scale, num_keys=shape.M, **windows),
        ops.selected_attention(
            q,
            k,
            v,
            ids,
            block_size=shape.BS,
            scale=scale,
            cu_seqlens=shape.offsets,
            block_counts=16,
        ),
        ops.sliding_window_attention(
            q, k, v, window_size=shape.window, scale=scale, cu_seqlens=shape.offsets
        ),
    )
    for branch, expected in enumerate(alone):
        for off in (zero, None):
            gates = [one if i == branch else off for i in range(3)]
            o = ops.native_sparse_attention(
                q, k, v, *gates, block_indices=ids, scale=scale, **options(shape)
            )
            assert torch.allclose(o, expected, atol=1e-12)


@pytest.mark.parametrize("given", [True, False], ids=["all blocks given", "all blocks chosen"])
def test_all_blocks_selected_is_dense_attention(given: bool) -> None:
    shape = Shape(B=2, N=45, M=45)
    q, k, v = shape.make()
    one, zero = torch.ones(2, 45, 6), torch.zeros(2, 45, 6)
    ids = every_block(shape) if given else None
    o = ops.native_sparse_attention(
        q, k, v, zero, one, None, block_indices=ids, block_counts=5, **options(shape)
    )
    dense = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    assert torch.allclose(o, dense.transpose(1, 2), atol=1e-5)


def test_given_blocks_win_over_selection() -> None:
    shape = Shape(N=60, M=60, BS=8)
    (q, k, v), (g_cmp, g_slc, _) = shape.make(), gates_of(shape)
    ids = torch.zeros(1, 60, 2, 1, dtype=torch.int32)
    o = ops.native_sparse_attention(q, k, v, g_cmp, g_slc, block_indices=ids, **options(shape))
    cmp = ops.native_sparse_attention(q, k, v, g_cmp, **options(shape))
    slc = ops.selected_attention(q, k, v, ids, block_size=8)
    assert torch.allclose(o, cmp + g_slc[..., None] * slc, atol=1e-6)


def test_counts_cut_given_blocks() -> None:
    shape = Shape(N=60, M=60, BS=8)
    (q, k, v), g = shape.make(), torch.ones(1, 60, 6)
    counts = torch.randint(0, 5, (1, 60, 2), dtype=torch.int32)
    for count in (2, counts, None):
        o = ops.native_sparse_attention(
            q, k, v, g_slc=g, block_indices=every_block(shape), block_counts=count, **options(shape)
        )
        expected = ops.selected_attention(
            q, k, v, every_block(shape), block_size=8, block_counts=count
        )
        assert torch.allclose(o, expected, atol=1e-6)


def test_gates_need_not_sum_to_one() -> None:
    gates, outputs = (
        [torch.full((1, 2, 3), x) for x in (2.0, -1.0)],
        [torch.full((1, 2, 3, 4), x) for x in (10.0, 3.0)],
    )
    assert torch.equal(gated_sum([*gates, None], [*outputs, None]), torch.full((1, 2, 3, 4), 17.0))


def test_the_sum_runs_in_fp32() -> None:
    """2 * 40 000 fits no half, 2 * 40 000 - 20 000 does."""
    gates = [torch.full((1, 2, 3), x, dtype=torch.float16) for x in (2.0, -1.0)]
    outputs = [torch.full((1, 2, 3, 4), x, dtype=torch.float16) for x in (40_000.0, 20_000.0)]
    assert torch.equal(
        gated_sum(gates, outputs), torch.full((1, 2, 3, 4), 60_000.0, dtype=torch.float16)
    )


@pytest.mark.parametrize("N", [60, 300], ids=["one tile", "several tiles"])
def test_nothing_leaks_from_the_future(N: int) -> None:
    shape = Shape(N=N, M=N, BS=8)
    later = slice(41, None)

    def call(*x: Tensor) -> tuple[Tensor]:
        return (ops.native_sparse_attention(*x, block_counts=3, **options(shape)),)

    assert_blind_to(
        call, [*shape.make(), *gates_of(shape)], [(i, later) for i in range(6)], slice(0, 41)
    )


def test_packed_sequences_are_separate_calls() -> None:
    shape = SHAPES["packed"]
    inputs = [*shape.make(), *gates_of(shape)]
    o = ops.native_sparse_attention(*inputs, block_counts=4, **options(shape))
    for start, end in ((0, 7), (7, 12), (12, 80)):
        part = [x[:, start:end] for x in inputs]
        alone = ops.native_sparse_attention(
            *part, block_counts=4, **options(replace(shape, cu=None))
        )
        assert torch.allclose(o[:, start:end], alone, atol=1e-6)


SMALL = Shape(N=8, M=11, G=2, D=3, DV=2, length=3, stride=2, BS=2, window=3)


@pytest.mark.parametrize(
    "shape",
    [SMALL, replace(SMALL, N=11, G=1, cu=(0, 3, 11))],
    ids=["more keys than queries", "packed"],
)
@pytest.mark.parametrize("branches", ["all", "compression", "selection", "window"])
def test_gradients(branches: str, shape: Shape) -> None:
    """In q, k, v and the gates. Scores differ by more than gradcheck's steps, so that the choice of
    blocks stays."""
    kept = [branches in (name, "all") for name in ("compression", "selection", "window")]
    gates = [g for g, keep in zip(gates_of(shape, torch.float64), kept, strict=True) if keep]
    ids = None if branches == "all" else every_block(shape)[..., 1::2]
    inputs = [x.requires_grad_() for x in (*shape.make(torch.float64), *gates)]

    def call(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
        remaining = list(gates)
        gates = [remaining.pop(0) if keep else None for keep in kept]
        return ops.native_sparse_attention(
            q, k, v, *gates, block_indices=ids, block_counts=4, **options(shape)
        )

    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)


def test_gradients_of_a_choice_reach_the_compression_branch_alone() -> None:
    """What is chosen by has no gradient: with g_cmp at 0, summaries get none."""
    shape = Shape(N=60, M=60, BS=8)
    (q, k, v), (_, g_slc, _) = shape.make(torch.float64), gates_of(shape, torch.float64)
    k.requires_grad_()
    o = ops.native_sparse_attention(
        q, k, v, torch.zeros_like(g_slc), g_slc, block_counts=3, **options(shape)
    )
    ids = ops.select_blocks(
        q, ops.compress(k, length=7, stride=3), top_n=3, block_size=8, length=7, stride=3
    )
    given = ops.native_sparse_attention(q, k, v, g_slc=g_slc, block_indices=ids, **options(shape))
    (gradient,), (expected,) = torch.autograd.grad(o.sum(), k), torch.autograd.grad(given.sum(), k)
    assert torch.allclose(gradient, expected, atol=1e-12)


@shapes
@pytest.mark.parametrize("counts", [None, 2], ids=["all slots", "two slots"])
def test_the_fast_selected_attention_is_the_slow_one(counts: int | None, shape: Shape) -> None:
    """Under a mask and by gathering: the same for lists with holes, ids of the future and ids past
    the end, gradients included."""
    inputs = [x.requires_grad_() for x in shape.make(torch.float64)]
    g = torch.Generator().manual_seed(3)
    blocks = -(-shape.M // shape.BS) + 3
    ids = torch.rand(shape.B, shape.N, shape.H, blocks, generator=g).argsort(-1)[..., :4].int()
    ids = ids.masked_fill(torch.rand(ids.shape, generator=g) < 0.2, -1)
    ids[..., 0] = torch.where(torch.rand(ids.shape[:3], generator=g) < 0.1, 2**31 - 1, ids[..., 0])
    rows = query_rows(
        shape.B, shape.N, shape.M, causal=True, cu_seqlens=shape.offsets, device=ids.device
    )
    ids = block_list(ids, rows, block_size=shape.BS, block_counts=counts, include_own_block=False)
    results = []
    for attend in (forward, query_tiles.selected_attention):
        o, lse = attend(*inputs, ids, rows, block_size=shape.BS, scale=0.3)
        results.append((o, lse, *torch.autograd.grad(o.square().sum(), inputs)))
    for slow, fast in zip(*results, strict=True):
        assert torch.allclose(slow, fast, atol=1e-12)


def test_blocks_that_nobody_chose_touch_nothing() -> None:
    """NaN in them reaches neither the output nor a gradient."""
    shape = Shape(N=60, M=60, BS=8)
    q, k, v = shape.make()
    k[:, 16:24], v[:, 16:24] = torch.nan, torch.nan
    inputs = [x.requires_grad_() for x in (q, k, v)]
    ids = torch.tensor([0, 1, 3, 5], dtype=torch.int32).expand(1, 60, 2, 4)
    ops.native_sparse_attention(
        *inputs, g_slc=torch.ones(1, 60, 6), block_indices=ids, block_size=8
    ).sum().backward()
    assert all(x.grad.isfinite().all() for x in inputs)


@pytest.mark.parametrize(("B", "N"), [(0, 9), (1, 0)], ids=["no sequence", "no query"])
def test_nothing_to_do(B: int, N: int) -> None:
    shape = Shape(B=B, N=N, M=9)
    o = ops.native_sparse_attention(
        *shape.make(), *gates_of(shape), block_counts=3, **options(shape)
    )
    assert o.shape == (B, N, 6, 40)


# -- the layer --

TINY = NativeSparseAttentionConfig(
    width=20, query_heads=6, kv_heads=2, key_width=8, value_width=5, block_size=8, top_n=3,
    window_size=5,
    length=7, stride=3, gate_width=4,
)  # fmt: skip


def layer_of(config: NativeSparseAttentionConfig) -> NativeSparseAttention:
    torch.manual_seed(0)
    return NativeSparseAttention(config)


CONFIGS = {
    "mlp": TINY,
    "mean": replace(TINY, compression="mean"),
    "weighted": replace(TINY, compression="weighted"),
    "linear": replace(TINY, compression="linear"),
    "one set of keys": replace(TINY, separate_keys=False),
    "no rotary embedding": replace(TINY, rotary_base=None, key_width=7),
}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


@configs
def test_every_parameter_learns(config: NativeSparseAttentionConfig) -> None:
    layer = layer_of(config)
    y = layer(torch.randn(2, 60, 20))
    assert y.shape == (2, 60, 20)
    y.square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@configs
def test_the_layer_is_causal(config: NativeSparseAttentionConfig) -> None:
    layer = layer_of(config)
    x = torch.randn(2, 60, 20)
    y = layer(x)
    x[:, 41:] = torch.nan
    assert torch.allclose(y[:, :41], layer(x)[:, :41], atol=1e-6)


@configs
def test_the_layer_packs(config: NativeSparseAttentionConfig) -> None:
    """Positions, summaries, blocks and windows count from each sequence's start."""
    layer = layer_of(config).double()
    x = torch.randn(1, 60, 20, dtype=torch.float64)
    y = layer(x, torch.tensor([0, 5, 5, 28, 60], dtype=torch.int32))
    for start, end in ((0, 5), (5, 28), (28, 60)):
        assert torch.allclose(y[:, start:end], layer(x[:, start:end]), atol=1e-12)


def test_gradients_of_the_layer() -> None:
    """Gate MLP and learnt compression included."""
    config = replace(
        TINY,
        width=3,
        query_heads=2,
        kv_heads=1,
        key_width=2,
        value_width=2,
        length=3,
        stride=2,
        block_size=4,
    )
    layer = layer_of(config).double()
    names = list(dict(layer.named_parameters()))
    x = torch.randn(1, 9, 3, dtype=torch.float64)

    def call(*parameters: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(call, tuple(layer.parameters()), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_the_layer_in_half_precision(dtype: torch.dtype) -> None:
    layer, x = layer_of(TINY), torch.randn(1, 60, 20)
    y = layer(x)
    y_half = layer.to(dtype)(x.to(dtype))
    assert y_half.dtype == dtype
    # not close everywhere: rounding may choose another block
    assert (y_half.float() - y).abs().median() < 0.02


@pytest.mark.parametrize("kind", ["weighted", "linear"])
def test_learnt_compression_begins_as_the_mean(kind: str) -> None:
    x = torch.randn(2, 30, 2, 8)
    assert torch.allclose(
        Compression(kind, 7, 3, 2, 8)(x), ops.compress(x, length=7, stride=3), atol=1e-6
    )


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).expand(2, 1, 12, 1, 8)
    position = torch.arange(12)
    scores = rotate(q, position, 100.0)[0, :, 0] @ rotate(k, position, 100.0)[0, :, 0].T
    for distance in range(-11, 12):
        assert torch.allclose(
            scores.diagonal(distance),
            scores.diagonal(distance)[0].expand(12 - abs(distance)),
            atol=1e-12,
        )
    assert torch.equal(rotate(q, torch.zeros(12), 100.0), q)
    assert not torch.allclose(scores[0, 0], scores[0, 5])


def test_the_layer_learns_to_recall() -> None:
    """A few steps of training bring the loss down: say what was said twelve positions before."""
    torch.manual_seed(0)
    layer = NativeSparseAttention(
        replace(TINY, width=16, key_width=16, value_width=16, window_size=4)
    )
    x = torch.randn(4, 48, 16)
    target = torch.cat([torch.zeros(4, 12, 16), x[:, :-12]], 1)
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.01)
    losses = []
    for _ in range(30):
        loss = F.mse_loss(layer(x), target)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


PAPER = NativeSparseAttentionConfig(width=256, query_heads=16, kv_heads=1)


@pytest.mark.exhaustive
def test_the_reference_trains_at_1024_tokens() -> None:
    """Forward and backward in seconds of one core, whatever else runs on it."""
    layer, x = layer_of(PAPER), torch.randn(1, 1024, 256)
    start = time.process_time()
    layer(x).sum().backward()
    assert time.process_time() - start < 6


def test_scores_of_one_tile_exist_at_a_time(watch) -> None:
    """No tensor on the way holds a number for each query and key."""
    N = 1024
    with torch.no_grad(), watch(LargestStorage()) as largest:
        layer_of(PAPER)(torch.randn(1, N, 256))
    assert largest.bytes <= 4 * 16 * 128 * N  # 16 heads, a tile of 128 queries


@pytest.mark.exhaustive
def test_the_reference_at_4096_tokens_stays_small() -> None:
    """Peak memory of a process of its own, PyTorch included."""
    pytest.importorskip("resource")
    program = """
import resource, torch
from nsa_tutorial import NativeSparseAttention, NativeSparseAttentionConfig
torch.set_num_threads(1)
with torch.no_grad():
    config = NativeSparseAttentionConfig(width=256, query_heads=16, kv_heads=1)
    NativeSparseAttention(config)(torch.randn(1, 4096, 256))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(done.stdout) * unit < 2 * 2**30


WRONG_CONFIGS = {
    "width 0": ({"width": 0}, ValueError, "width: got 0, expected an int of at least 1"),
    "heads a float": ({"query_heads": 6.0}, TypeError, r"query_heads: got 6\.0 \(float\)"),
    "no multiple": ({"query_heads": 5}, ValueError, "query_heads: got 5, expected a multiple of "
                                                    "kv_heads, 2"),
    "too few slots": ({"top_n": 2}, ValueError, "top_n: got 2, expected an int of at least 3"),
    "too wide": ({"value_width": 257}, ValueError, "value_width: got 257, expected an int of at "
                                                   "most 256"),
    "window 0": ({"window_size": 0}, ValueError, "window_size: got 0"),
    "unknown compression": ({"compression": "max"}, ValueError, "compression: got 'max'.*expected "
                                                                "one of mean, weighted"),
    "separate_keys not a bool": ({"separate_keys": 1}, TypeError, "separate_keys: got 1"),
    "rotary base of 0": ({"rotary_base": 0.0}, ValueError, r"rotary_base: got 0\.0, expected a "
                                                           r"positive finite number or None"),
    "odd width to rotate": ({"key_width": 7}, ValueError, "key_width: got 7, expected an even "
                                                          "width"),
    "unknown backend": ({"backend": "cuda"}, ValueError, "backend: got 'cuda'"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "error", "message"), WRONG_CONFIGS.values(), ids=WRONG_CONFIGS.keys()
)
def test_wrong_config(change: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        replace(TINY, **change)


def test_wrong_input_of_the_layer() -> None:
    layer = layer_of(TINY)
    with pytest.raises(
        ValueError, match=r"x: got .*\[1, 9, 21\].*expected the width of the layer, 20"
    ):
        layer(torch.zeros(1, 9, 21))
    with pytest.raises(ValueError, match=r"x: got .*expected 3 dimensions"):
        layer(torch.zeros(9, 20))
    with pytest.raises(
        ValueError, match="cu_seqlens: got a last offset of 8, expected the number of positions, 9"
    ):
        layer(torch.zeros(1, 9, 20), torch.tensor([0, 8]))
