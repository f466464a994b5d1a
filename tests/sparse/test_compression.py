"""Summaries are made of their own tokens, and are seen once they have ended."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from branches import LargestStorage, Shape, assert_attention, assert_blind_to, finite
from places import in_dtypes, name_of
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.sparse.compression import (
    KINDS,
    MLPWeights,
    compress,
    has_pieces,
    num_summaries,
    summarise_pieces,
    summary_offsets,
    summary_rows,
)
from nsa_tutorial.sparse.selected_attention import query_rows

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

SHAPES = {
    "length no multiple of stride": Shape(B=2),
    "the paper's length and stride": Shape(N=150, M=150, length=32, stride=16),
    "stride longer than length": Shape(length=3, stride=5),
    "length 1, stride 1": Shape(length=1, stride=1),
    "more keys than queries": Shape(B=2, N=9, M=40),
    "decoding: one query": Shape(B=2, N=1, M=40),
    "fewer keys than a summary": Shape(N=5, M=6),
    "exactly one summary": Shape(N=7, M=7),
    "several tiles of queries": Shape(N=290, M=301, D=8, DV=4, length=9, stride=4),
    "packed, one empty, one too short": Shape(N=50, M=50, cu=(0, 7, 7, 12, 50)),
    "packed, stride longer than length": Shape(N=50, M=50, length=3, stride=5, cu=(0, 2, 19, 50)),
    "packed, none long enough": Shape(N=12, M=12, cu=(0, 6, 12)),
    "large scores": Shape(magnitude=60.0),
    "one KV head, G 16": Shape(H=1, G=16, D=16, DV=16),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


def weight_of(kind: str, shape: Shape, *, per_head: bool, D: int) -> Tensor | MLPWeights | None:
    g = torch.Generator().manual_seed(1)
    heads, hidden, flat = ((shape.H,) if per_head else ()), 5, shape.length * D

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, dtype=torch.float64)

    if kind == "mean":
        return None
    if kind == "weighted":
        return draw(shape.length, *heads)
    if kind == "linear":
        return draw(*heads, flat, D) / 4
    sizes = ((shape.length, D), (flat, hidden), (hidden,), (hidden, D), (D,))
    return MLPWeights(*(draw(*heads, *size) / 4 for size in sizes))


def compress_loop(x: Tensor, kind: str, shape: Shape, weight: Tensor | MLPWeights | None) -> Tensor:
    """One batch, one summary and one head at a time."""
    out = torch.zeros(shape.B, len(shape.summaries()), *x.shape[2:], dtype=x.dtype)
    for b in range(shape.B):
        for j, (s, first) in enumerate(shape.summaries()):
            begin = shape.bounds[s][0] + first
            for h in range(shape.H):
                tokens = [x[b, begin + i, h] for i in range(shape.length)]
                if kind == "mean":
                    out[b, j, h] = sum(tokens) / shape.length
                elif kind == "weighted":
                    of_head = weight if weight.ndim == 1 else weight[:, h]
                    out[b, j, h] = sum(of_head[i] * token for i, token in enumerate(tokens))
                elif kind == "linear":
                    out[b, j, h] = torch.cat(tokens) @ (weight if weight.ndim == 2 else weight[h])
                else:
                    w = weight if weight.b1.ndim == 1 else MLPWeights(*(part[h] for part in weight))
                    window = torch.cat([token + w.position[i] for i, token in enumerate(tokens)])
                    out[b, j, h] = F.gelu(window @ w.w1 + w.b1) @ w.w2 + w.b2
    return out


@pytest.mark.parametrize(
    ("M", "length", "stride"),
    [(100, 32, 16), (31, 32, 16), (32, 32, 16), (5, 2, 3), (0, 4, 2), (9, 1, 1)],
)
def test_num_summaries_counts_windows(M: int, length: int, stride: int) -> None:
    windows = [start for start in range(0, M, stride) if start + length <= M]
    assert num_summaries(M, length, stride) == len(windows)
    assert num_summaries(torch.tensor([M]), length, stride).tolist() == [len(windows)]


@shapes
@pytest.mark.parametrize("per_head", [False, True], ids=["shared weight", "weight per head"])
@pytest.mark.parametrize("kind", KINDS)
def test_compress_is_the_loop(kind: str, per_head: bool, shape: Shape) -> None:
    x = shape.make(torch.float64)[1][..., :6]
    weight = weight_of(kind, shape, per_head=per_head, D=6)
    got = ops.compress(
        x,
        kind=kind,
        length=shape.length,
        stride=shape.stride,
        weight=weight,
        cu_seqlens=shape.offsets,
    )
    assert torch.allclose(got, compress_loop(x, kind, shape, weight), atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("kind", KINDS)
def test_compress_rounds_once(kind: str, dtype: torch.dtype) -> None:
    """In half precision the sum over the window runs in fp32, and the result alone is rounded."""
    shape = Shape(length=30, stride=4)
    x = shape.make(dtype)[1][..., :6]
    weight = weight_of(kind, shape, per_head=True, D=6)
    got = ops.compress(x, kind=kind, length=30, stride=4, weight=weight)
    assert got.dtype == dtype
    truth = compress_loop(x.double(), kind, shape, weight)
    assert torch.allclose(got.double(), truth, rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_packed_sequences_are_compressed_apart() -> None:
    shape = Shape(N=50, M=50, cu=(0, 7, 7, 12, 50))
    x = shape.make(torch.float64)[1]
    packed = ops.compress(x, length=7, stride=3, cu_seqlens=shape.offsets)
    apart = [ops.compress(x[:, start:end], length=7, stride=3) for start, end in pairwise(shape.cu)]
    assert torch.equal(packed, torch.cat(apart, 1))
    assert summary_offsets(shape.offsets, 7, 3).tolist() == [0, 1, 1, 1, 12]


def test_a_summary_knows_its_own_tokens_only() -> None:
    x = Shape().make()[1]
    before = ops.compress(x, length=7, stride=3)
    x[:, 20] = torch.nan
    after = ops.compress(x, length=7, stride=3)
    spoiled = after.isnan().all(-1).all(-1)[0].nonzero().flatten().tolist()
    assert spoiled == [5, 6]  # tokens 15 to 21 and 18 to 24
    keep = [j for j in range(before.shape[1]) if j not in spoiled]
    assert torch.equal(before[:, keep], after[:, keep])


def test_weighted_and_linear_hold_the_mean() -> None:
    x = Shape().make(torch.float64)[1]
    mean = ops.compress(x, length=7, stride=3)
    weighted = ops.compress(
        x, kind="weighted", length=7, stride=3, weight=torch.full((7,), 1 / 7, dtype=torch.float64)
    )
    linear = ops.compress(
        x,
        kind="linear",
        length=7,
        stride=3,
        weight=torch.eye(24, dtype=torch.float64).repeat(7, 1) / 7,
    )
    assert torch.allclose(mean, weighted, atol=1e-14)
    assert torch.allclose(mean, linear, atol=1e-14)


@pytest.mark.parametrize("per_head", [False, True], ids=["shared weight", "weight per head"])
@pytest.mark.parametrize("kind", KINDS)
def test_compress_gradients(kind: str, per_head: bool) -> None:
    shape = Shape(M=9, length=3, stride=2)
    x = shape.make(torch.float64)[1][..., :2].requires_grad_()
    weight = weight_of(kind, shape, per_head=per_head, D=2)
    inputs = [] if weight is None else [*weight] if kind == "mlp" else [weight]

    def compress(x: Tensor, *weights: Tensor) -> Tensor:
        weight = MLPWeights(*weights) if kind == "mlp" else weights[0] if weights else None
        return ops.compress(
            x, kind=kind, length=3, stride=2, weight=weight, cu_seqlens=torch.tensor([0, 5, 9])
        )

    inputs = [x, *(w.requires_grad_() for w in inputs)]
    assert torch.autograd.gradcheck(compress, inputs, fast_mode=True)


def attend(
    shape: Shape, q: Tensor, k_cmp: Tensor, v_cmp: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    return ops.compressed_attention(
        q, k_cmp, v_cmp, length=shape.length, stride=shape.stride, scale=scale, num_keys=shape.M,
        cu_seqlens=shape.offsets, return_lse=True,
    )  # fmt: skip


def summarised(shape: Shape, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = shape.make(dtype)
    options = {"length": shape.length, "stride": shape.stride, "cu_seqlens": shape.offsets}
    return q, ops.compress(k, **options), ops.compress(v, **options)


@pytest.mark.parametrize(("shape", "dtype"), in_dtypes(SHAPES))
def test_compressed_attention(shape: Shape, dtype: torch.dtype) -> None:
    q, k_cmp, v_cmp = summarised(shape, dtype)
    mask = shape.over_heads(shape.seen_summaries())
    assert_attention(*attend(shape, q, k_cmp, v_cmp), q, k_cmp, v_cmp, mask)
    if dtype == torch.float64:
        assert_attention(*attend(shape, q, k_cmp, v_cmp, 0.71), q, k_cmp, v_cmp, mask, 0.71)


def test_a_summary_is_seen_once_it_ends() -> None:
    """Windows of 4 every 2: tokens 0 to 3, 2 to 5, 4 to 7."""
    rows = query_rows(1, 9, 9, causal=True, cu_seqlens=None, device=torch.device("cpu"))
    assert summary_rows(rows, 9, length=4, stride=2, cu_seqlens=None).num_visible.tolist() == [
        0,
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        3,
    ]


def test_rows_of_packed_summaries() -> None:
    """Sequences of 5, 0, 2 and 6 tokens have 2, 0, 0 and 2 summaries."""
    cu = torch.tensor([0, 5, 5, 7, 13], dtype=torch.int32)
    rows = query_rows(1, 13, 13, causal=True, cu_seqlens=cu, device=torch.device("cpu"))
    rows = summary_rows(rows, 13, length=4, stride=1, cu_seqlens=cu)
    assert rows.first_key.tolist() == [0] * 5 + [2] * 8
    assert rows.num_visible.tolist() == [0, 0, 0, 1, 2, 0, 0, 0, 0, 0, 1, 2, 3]
    assert rows.position.tolist() == [0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3, 4, 5]


def test_rows_of_a_batch_begin_at_their_own_summaries() -> None:
    rows = query_rows(2, 2, 9, causal=True, cu_seqlens=None, device=torch.device("cpu"))
    assert summary_rows(rows, 9, length=4, stride=2, cu_seqlens=None).first_key.tolist() == [
        0,
        0,
        3,
        3,
    ]


@pytest.mark.parametrize(
    "shape", [Shape(N=9, M=9), Shape(N=5, M=6)], ids=["the first six see none", "there is none"]
)
def test_queries_without_summaries(shape: Shape) -> None:
    inputs = [x.requires_grad_() for x in summarised(shape)]
    o, lse = attend(shape, *inputs)
    assert torch.equal(o[:, :6], torch.zeros_like(o[:, :6]))
    assert torch.equal(lse[:, :6], torch.full_like(lse[:, :6], -torch.inf))
    (o[:, :6].sum() + finite(lse[:, :6]).sum()).backward()
    assert all(torch.equal(x.grad, torch.zeros_like(x)) for x in inputs)


@pytest.mark.parametrize("N", [37, 290], ids=["one tile", "several tiles"])
def test_nothing_leaks_from_the_future(N: int) -> None:
    """Summary 5 covers the tokens 15 to 21: queries 0 to 20 know nothing of it."""
    shape = Shape(N=N, M=N)
    later = slice(5, None)
    assert_blind_to(
        lambda *x: attend(shape, *x),
        list(summarised(shape)),
        [(1, later), (2, later)],
        slice(0, 21),
    )

    def whole(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return attend(shape, q, *(ops.compress(x, length=7, stride=3) for x in (k, v)))

    later = slice(21, None)
    assert_blind_to(whole, list(shape.make()), [(0, later), (1, later), (2, later)], slice(0, 21))


def test_a_visible_nan_is_seen() -> None:
    shape = Shape()
    q, k_cmp, v_cmp = summarised(shape)
    for i in (1, 2):
        inputs = [q, k_cmp.clone(), v_cmp.clone()]
        inputs[i][:, 5] = torch.nan
        o, _ = attend(shape, *inputs)
        assert o[:, 21:].isnan().all()


def test_packed_sequences_are_separate_calls() -> None:
    shape = Shape(N=50, M=50, cu=(0, 7, 7, 12, 50))
    q, k, v = shape.make()
    o, lse = attend(
        shape, q, *(ops.compress(x, length=7, stride=3, cu_seqlens=shape.offsets) for x in (k, v))
    )
    for start, end in ((0, 7), (7, 12), (12, 50)):
        part = Shape(N=end - start, M=end - start)
        k_cmp, v_cmp = (ops.compress(x[:, start:end], length=7, stride=3) for x in (k, v))
        o_part, lse_part = attend(part, q[:, start:end], k_cmp, v_cmp)
        assert torch.allclose(o[:, start:end], o_part, atol=1e-6)
        assert torch.allclose(lse[:, start:end], lse_part, atol=1e-6)


SMALL = Shape(N=7, M=9, G=2, D=3, DV=2, length=3, stride=2)


@pytest.mark.parametrize(
    "shape",
    [SMALL, replace(SMALL, N=9, G=1, cu=(0, 2, 9))],
    ids=["more keys than queries", "packed"],
)
def test_compressed_attention_gradients(shape: Shape) -> None:
    def outputs(*x: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = attend(shape, *x)
        return o, finite(lse)

    assert torch.autograd.gradcheck(
        outputs, [x.requires_grad_() for x in summarised(shape, torch.float64)], fast_mode=True
    )


def test_strided_inputs() -> None:
    shape = Shape(B=2)
    inputs = summarised(shape)
    strided = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in inputs]
    assert not any(x.is_contiguous() for x in strided)
    assert torch.allclose(attend(shape, *inputs)[0], attend(shape, *strided)[0], atol=1e-6)
    x = shape.make()[1]
    assert torch.equal(
        ops.compress(x), ops.compress(x.transpose(1, 3).contiguous().transpose(1, 3))
    )


@pytest.mark.parametrize(("B", "N"), [(0, 9), (1, 0)], ids=["no sequence", "no query"])
def test_nothing_to_do(B: int, N: int) -> None:
    shape = Shape(B=B, N=N, M=9)
    o, lse = attend(shape, *summarised(shape))
    assert (o.shape, lse.shape) == ((B, N, 6, 40), (B, N, 6))


def test_scores_of_one_tile_exist_at_a_time(watch) -> None:
    shape = Shape(N=2048, M=2048, H=1, G=16, D=4, DV=4, length=32, stride=16)
    inputs = summarised(shape)
    with torch.no_grad(), watch(LargestStorage()) as largest:
        attend(shape, *inputs)
    assert largest.bytes <= 16 * 128 * 127 * 4


# -- summaries from pieces of `stride` tokens --

PIECES = {
    "the paper's length and stride": Shape(N=150, M=150, length=32, stride=16),
    "a tail that no window takes": Shape(B=2, length=9, stride=3),
    "one piece a window": Shape(length=5, stride=5),
    "exactly one window": Shape(N=8, M=8, length=8, stride=2),
    "stride 1": Shape(length=4, stride=1),
}
LEARNT = tuple(kind for kind in KINDS if kind != "mean")


@pytest.mark.parametrize("shape", PIECES.values(), ids=PIECES.keys())
@pytest.mark.parametrize("per_head", [False, True], ids=["shared weight", "weight per head"])
@pytest.mark.parametrize("kind", LEARNT)
def test_pieces_give_what_windows_give(kind: str, per_head: bool, shape: Shape) -> None:
    """Summaries and gradients."""
    x = shape.make(torch.float64)[1][..., :6].requires_grad_()
    weight = weight_of(kind, shape, per_head=per_head, D=6)
    leaves = [x, *(w.requires_grad_() for w in (weight if kind == "mlp" else [weight]))]
    assert has_pieces(shape.M, shape.length, shape.stride, None)
    sizes = {"length": shape.length, "stride": shape.stride}
    found = summarise_pieces(x, kind=kind, **sizes, weight=weight)
    right = compress(x, kind=kind, **sizes, weight=weight)
    assert torch.allclose(found, right, atol=1e-12)
    gradients = (torch.autograd.grad(y.square().sum(), leaves) for y in (found, right))
    assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("kind", LEARNT)
def test_windows_are_not_copied(kind: str, watch) -> None:
    """Overlapping windows would hold each token twice."""
    shape = Shape(M=512, length=32, stride=16)
    x = shape.make()[1][..., :8].contiguous()
    weight = weight_of(kind, shape, per_head=False, D=8)
    weight = MLPWeights(*(w.float() for w in weight)) if kind == "mlp" else weight.float()
    with torch.no_grad(), watch(LargestStorage()) as largest:
        ops.compress(x, kind=kind, weight=weight)
    assert largest.bytes <= x.numel() * x.element_size()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("kind", LEARNT)
def test_half_precision_on_a_gpu(kind: str, dtype: torch.dtype) -> None:
    """Tensor cores multiply in the dtype of the tokens: an error of its rounding, no more."""
    shape = Shape(B=2, M=512, length=32, stride=16)
    x = shape.make(dtype)[1].cuda()
    weight = weight_of(kind, shape, per_head=True, D=x.shape[3])
    weight = [w.to("cuda", dtype) for w in (weight if kind == "mlp" else [weight])]
    exact = [w.double() for w in weight]
    of = (lambda w: MLPWeights(*w)) if kind == "mlp" else (lambda w: w[0])
    got = ops.compress(x, kind=kind, weight=of(weight))
    truth = compress(x.double(), kind=kind, weight=of(exact))
    assert got.dtype == dtype
    assert (got - truth).norm() <= 2 * torch.finfo(dtype).eps * truth.norm()
