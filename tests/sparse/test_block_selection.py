"""Which blocks a query attends to: by overlap with what it attended to in summary, the same for a
group, never from the future."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import pytest
import torch
from branches import LargestStorage, Shape, select_loop
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.sparse.block_selection import importance, overlap_weights
from nsa_tutorial.sparse.compression import summary_rows
from nsa_tutorial.sparse.selected_attention import query_rows

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = {
    "nothing divides anything": Shape(B=2),
    "the paper's sizes": Shape(N=330, M=330, H=1, G=2, D=8, length=32, stride=16, BS=64),
    "more keys than queries": Shape(B=2, N=9, M=90),
    "decoding: one query": Shape(B=2, N=1, M=90),
    "several tiles of queries": Shape(N=150, M=161, G=2, D=8),
    "stride longer than length": Shape(N=60, M=60, length=3, stride=5, BS=4),
    "summaries longer than blocks": Shape(N=60, M=60, length=11, stride=2, BS=4),
    "stride longer than blocks": Shape(N=60, M=60, length=12, stride=9, BS=4),
    "blocks of one token": Shape(N=20, M=20, length=2, stride=1, BS=1),
    "fewer keys than a summary": Shape(N=5, M=6, BS=2),
    "packed, one empty, one too short": Shape(N=80, M=80, BS=4, cu=(0, 7, 7, 12, 80)),
    "sharp scores": Shape(N=60, M=60, BS=4, magnitude=5.0),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
PICKS = {
    "default": (7, 1, 2),
    "two forced at either end": (5, 2, 2),
    "nothing forced": (4, 0, 0),
    "forced alone": (3, 1, 2),
    "one": (1, 0, 1),
}
# All picks of one shape, and of every other shape one, in turn.
PAIRS = {(name, pick) for name, pick in zip(SHAPES, cycle(PICKS), strict=False)}
PAIRS |= {("nothing divides anything", pick) for pick in PICKS}
shapes_and_picks = pytest.mark.parametrize(
    ("shape", "pick"),
    [pytest.param(SHAPES[x], PICKS[y], id=f"{x}-{y}") for x, y in sorted(PAIRS)],
)


def summarised(shape: Shape, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    q, k, _ = shape.make(dtype)
    return q, ops.compress(k, length=shape.length, stride=shape.stride, cu_seqlens=shape.offsets)


def options(shape: Shape) -> dict:
    return {
        "length": shape.length,
        "stride": shape.stride,
        "num_keys": shape.M,
        "cu_seqlens": shape.offsets,
    }


def select(
    shape: Shape, q: Tensor, k_cmp: Tensor, lse: Tensor | None = None, **more: object
) -> Tensor:
    return ops.select_blocks(q, k_cmp, lse, block_size=shape.BS, **options(shape), **more)


# -- from summaries to blocks --


def test_the_papers_weights_fall_out() -> None:
    """Blocks of 64, summaries of 32 every 16: those from 4j - 1 to 4j + 3 count 1, 2, 2, 2, 1
    times."""
    first, weights = overlap_weights(32, 16, 64, 5)
    assert first.tolist() == [-1, 3, 7, 11, 15]
    assert weights.tolist() == [[1, 2, 2, 2, 1]] * 5


@pytest.mark.parametrize(
    ("length", "stride", "block_size"),
    [(32, 16, 64), (48, 16, 64), (16, 16, 32), (64, 8, 8), (4, 4, 4)],
    ids=str,
)
def test_whole_pieces_are_the_papers_double_sum(length: int, stride: int, block_size: int) -> None:
    """Eq. 9, read 1-based as it must be: block j gets summary (block_size / stride) * j + m - n for
    every m and n."""
    first, weights = overlap_weights(length, stride, block_size, 4)
    for j in range(4):
        expected: dict[int, int] = {}
        for m in range(block_size // stride):
            for n in range(length // stride):
                summary = block_size // stride * j + m - n
                expected[summary] = expected.get(summary, 0) + 1
        got = {int(first[j]) + i: w for i, w in enumerate(weights[j].tolist()) if w}
        assert got == expected


@settings(max_examples=60, deadline=None, derandomize=True)
@given(length=st.integers(1, 20), stride=st.integers(1, 20), block_size=st.integers(1, 20))
def test_weights_are_shared_tokens_over_stride(length: int, stride: int, block_size: int) -> None:
    first, weights = overlap_weights(length, stride, block_size, 5)
    assert weights.shape[1] == 0 or weights[:, -1].any()
    for block in range(5):
        tokens = set(range(block * block_size, (block + 1) * block_size))
        got = {int(first[block]) + i: w for i, w in enumerate(weights[block].tolist()) if w}
        shared = {
            j: len(tokens & set(range(j * stride, j * stride + length))) for j in range(-25, 130)
        }
        assert got == pytest.approx({j: n / stride for j, n in shared.items() if n})


def test_importance_adds_up_to_the_mass() -> None:
    """Every token of a summary lies in some block: the importances sum to length / stride for each
    head that sees something."""
    shape = Shape(B=2, N=60, M=60, BS=4)
    q, k_cmp = summarised(shape)
    rows = summary_rows(
        query_rows(2, 60, 60, causal=True, cu_seqlens=None, device=q.device),
        60,
        length=7,
        stride=3,
        cu_seqlens=None,
    )
    total = importance(q, k_cmp, rows, overlap=overlap_weights(7, 3, 4, 15), scale=0.2).sum(-1)
    assert torch.equal(total[:, :6], torch.zeros_like(total[:, :6]))
    assert torch.allclose(total[:, 6:], torch.full_like(total[:, 6:], shape.G * 7 / 3), atol=1e-12)


# -- the choice --


@shapes_and_picks
def test_selection_is_the_loop(shape: Shape, pick: tuple[int, int, int]) -> None:
    q, k_cmp = summarised(shape)
    pick = dict(zip(("top_n", "num_initial", "num_local"), pick, strict=True))
    got = select(shape, q, k_cmp, **pick)
    assert got.dtype == torch.int32
    assert got.tolist() == select_loop(shape, q, k_cmp, **pick)


@shapes_and_picks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_properties(shape: Shape, pick: tuple[int, int, int], dtype: torch.dtype) -> None:
    q, k_cmp = summarised(shape, dtype)
    top_n, num_initial, num_local = pick
    ids = select(shape, q, k_cmp, top_n=top_n, num_initial=num_initial, num_local=num_local)
    assert ids.shape == (shape.B, shape.N, shape.H, top_n)
    for n, _, position in shape.queries():
        own = position // shape.BS
        forced = {*range(min(num_initial, own + 1)), *range(max(0, own - num_local + 1), own + 1)}
        for row in ids[:, n].flatten(0, 1).tolist():
            taken = row[: min(top_n, own + 1)]
            assert taken == sorted(set(taken)), "distinct and ascending"
            assert all(0 <= i <= own for i in taken), "no block of the future"
            assert forced <= set(taken)
            assert row[len(taken) :] == [-1] * (top_n - len(taken))
    ops.check_block_indices(ids, shape.M, block_size=shape.BS, cu_seqlens=shape.offsets)


@shapes
def test_each_row_keeps_as_many_as_it_counts(shape: Shape) -> None:
    """The forced blocks first, those with the lower ids before the others, then the most important
    ones."""
    q, k_cmp = summarised(shape)
    counts = torch.randint(
        0, 7, (shape.B, shape.N, shape.H), generator=torch.Generator().manual_seed(1)
    )
    sizes = {"top_n": 5, "num_initial": 1, "num_local": 2}
    found = select(shape, q, k_cmp, block_counts=counts, **sizes)
    assert found.tolist() == select_loop(shape, q, k_cmp, **sizes, counts=counts)


@shapes
def test_lse_spares_the_softmax(shape: Shape) -> None:
    q, k_cmp = summarised(shape)
    _, lse = ops.compressed_attention(q, k_cmp, k_cmp, **options(shape), return_lse=True)
    assert torch.equal(select(shape, q, k_cmp, top_n=4), select(shape, q, k_cmp, lse, top_n=4))


def test_ties_go_to_the_lower_id() -> None:
    """Keys of zero: every summary is attended to alike, and inner blocks to the last bit."""
    shape = Shape(N=100, M=100, length=6, stride=2, BS=8)
    q, _, _ = shape.make()
    ids = select(shape, q, q.new_zeros(1, 48, 2, 24), top_n=6)
    assert ids[0, 99, 0].tolist() == [0, 1, 2, 3, 11, 12]
    assert torch.equal(ids[:, 99], ids[:, 98])


def test_one_choice_per_group_by_the_sum_of_its_heads() -> None:
    """Head 0 likes block 1, head 1 likes block 2 more strongly; of the other group, both like block
    3."""
    q, k_cmp = torch.zeros(1, 24, 4, 4), torch.zeros(1, 6, 2, 4)  # blocks of 4, one summary each
    k_cmp[0, :4, 0] = k_cmp[0, :4, 1] = torch.eye(4)
    q[..., 0, 1], q[..., 1, 2], q[..., 2:, 3] = 3.0, 6.0, 5.0
    ids = ops.select_blocks(
        q, k_cmp, top_n=1, block_size=4, length=4, stride=4, num_initial=0, num_local=0
    )
    assert ids[0, -1].tolist() == [[2], [3]]


def test_scale_counts() -> None:
    """One head is sure of block 1, the other leans to block 2: which one prevails depends on the
    scale."""
    q, k_cmp = torch.zeros(1, 12, 2, 3), torch.zeros(1, 3, 1, 3)
    k_cmp[0, :, 0] = torch.eye(3)
    q[..., 0, :], q[..., 1, :] = torch.tensor([0.0, 4.0, 0.0]), torch.tensor([3.5, 0.0, 4.5])
    pick = {"top_n": 1, "block_size": 4, "length": 4, "stride": 4, "num_initial": 0, "num_local": 0}
    sharp, flat = (
        ops.select_blocks(q, k_cmp, **pick, scale=scale)[0, -1, 0, 0].item()
        for scale in (1.0, 0.05)
    )
    assert (sharp, flat) == (1, 2)


@pytest.mark.parametrize("N", [60, 300], ids=["one tile", "several tiles"])
def test_nothing_leaks_from_the_future(N: int) -> None:
    shape = Shape(N=N, M=N, BS=4)
    q, k, _ = shape.make()
    before = select(shape, q, ops.compress(k, length=7, stride=3), top_n=5)
    q[:, 41:], k[:, 41:] = torch.nan, torch.nan
    after = select(shape, q, ops.compress(k, length=7, stride=3), top_n=5)
    assert torch.equal(before[:, :41], after[:, :41])


def test_nan_does_not_displace_forced_blocks() -> None:
    shape = Shape(N=60, M=60, BS=4)
    q, k_cmp = summarised(shape)
    ids = select(shape, q * torch.nan, k_cmp, top_n=4)
    assert ids[0, -1, 0].tolist() == [0, 1, 13, 14]


def test_packed_sequences_are_separate_calls() -> None:
    shape = SHAPES["packed, one empty, one too short"]
    q, k, _ = shape.make()
    ids = select(shape, q, ops.compress(k, length=7, stride=3, cu_seqlens=shape.offsets), top_n=5)
    for start, end in ((0, 7), (7, 12), (12, 80)):
        part = replace(shape, N=end - start, M=end - start, cu=None)
        assert torch.equal(
            ids[:, start:end],
            select(
                part, q[:, start:end], ops.compress(k[:, start:end], length=7, stride=3), top_n=5
            ),
        )


def test_more_slots_than_blocks() -> None:
    shape = Shape(N=12, M=12, BS=4)
    ids = select(shape, *summarised(shape), top_n=9)
    assert ids[0, -1, 0].tolist() == [0, 1, 2] + [-1] * 6


def test_a_choice_has_no_gradient() -> None:
    q, k_cmp = (x.requires_grad_() for x in summarised(Shape()))
    assert not select(Shape(), q, k_cmp, top_n=4).requires_grad


@pytest.mark.parametrize(("B", "N"), [(0, 9), (1, 0)], ids=["no sequence", "no query"])
def test_nothing_to_do(B: int, N: int) -> None:
    shape = Shape(B=B, N=N, M=9)
    assert select(shape, *summarised(shape), top_n=4).shape == (B, N, 2, 4)


def test_scores_of_one_tile_exist_at_a_time(watch) -> None:
    shape = Shape(N=2048, M=2048, H=1, G=16, D=4, length=32, stride=16, BS=64)
    inputs = summarised(shape, torch.float32)
    with watch(LargestStorage()) as largest:
        select(shape, *inputs, top_n=16)
    assert largest.bytes <= 16 * 128 * 127 * 4
