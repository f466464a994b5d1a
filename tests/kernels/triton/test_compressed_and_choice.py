"""The choice of blocks in Triton beyond the operators' contract: its cells, its chunks, its picks,
and its offsets."""

from __future__ import annotations

import pytest
import torch
from branches import Shape
from hypothesis import given, settings
from hypothesis import strategies as st
from places import skip_unless_runs
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.kernels.tables import cells as score_cells
from nsa_tutorial.kernels.triton.choice import launch
from nsa_tutorial.kernels.triton.choice.pick import pick_kernel
from nsa_tutorial.kernels.triton.launch_options import (
    SHARED_MEMORY,
    attend_options,
    pick_options,
    score_options,
    tile_sizes,
)
from nsa_tutorial.sparse.block_selection import choose, importance, overlap_weights
from nsa_tutorial.sparse.compression import num_summaries, summary_rows
from nsa_tutorial.sparse.selected_attention import query_rows

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, in the interpreter
]


def on_devices(name: str, values: dict[str, object]) -> pytest.MarkDecorator:
    """A test's `name` and `device`: every value on the CPU and on CUDA."""
    return pytest.mark.parametrize(
        (name, "device"),
        [pytest.param(x, "cpu", id=f"{key}-cpu") for key, x in values.items()]
        + [pytest.param(x, "cuda", id=f"{key}-cuda", marks=pytest.mark.gpu)
           for key, x in values.items()],
    )  # fmt: skip


devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def inputs_of(shape: Shape, device: str = "cpu") -> tuple[Tensor, Tensor, dict[str, object]]:
    """Queries, summaries, and the sizes of the call."""
    q, k, _ = shape.make()
    cu_seqlens = None if shape.cu is None else shape.offsets.to(device)
    sizes = {
        "length": shape.length, "stride": shape.stride, "block_size": shape.BS,
        "num_keys": shape.M, "cu_seqlens": cu_seqlens, "backend": "triton",
    }  # fmt: skip
    return q.to(device), k[:, : len(shape.summaries())].to(device), sizes


# -- what the score kernel writes --

GEOMETRIES = {
    "the paper's": Shape(N=30, M=200, H=1, G=2, D=8, length=32, stride=16, BS=64),
    "a summary is a stride": Shape(N=20, M=50, length=2, stride=2, BS=8),
    "a summary of three strides": Shape(N=20, M=50, length=6, stride=2, BS=8),
    "a summary of a block and a stride": Shape(N=20, M=50, length=10, stride=2, BS=8),
    "16 strides a block": Shape(N=20, M=90, G=1, D=8, length=3, stride=1, BS=16),
    "several tiles": Shape(N=140, M=150, H=1, G=2, D=8, length=4, stride=2, BS=4),
    "a batch of whole tiles": Shape(B=2, N=128, M=130, G=1, D=8, length=4, stride=2, BS=8),
    "a batch of odd lengths": Shape(B=2, N=20, M=45, G=1, D=8, length=4, stride=2, BS=8),
    "packed": Shape(N=40, M=40, G=1, D=8, length=4, stride=2, BS=8, cu=(0, 17, 17, 40)),
    "nothing divides anything": Shape(N=20, M=50, D=8),
}


@on_devices("shape", GEOMETRIES)
def test_cells_add_up_to_what_blocks_are_worth(
    shape: Shape, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shares of a cell, each at its block; where a cell is one summary, its overlaps."""
    skip_unless_runs("triton", device)
    handed_over = {}

    class Recorded:
        """The kernel that reads the scores: it keeps them."""

        def __getitem__(self, grid: object) -> Recorded:
            return self

        def __call__(self, scores: Tensor, *_: object, **sizes: object) -> None:
            handed_over.update(sizes, scores=scores)

    monkeypatch.setattr(launch, "pick_kernel", Recorded())
    q, k_cmp, sizes = inputs_of(shape, device)
    ops.select_blocks(q, k_cmp, **sizes, top_n=3)

    rows = query_rows(
        shape.B, shape.N, shape.M, causal=True, cu_seqlens=sizes["cu_seqlens"], device=q.device
    )
    windows = {name: sizes[name] for name in ("length", "stride", "cu_seqlens")}
    rows = summary_rows(rows, shape.M, **windows)
    num_blocks = -(-shape.M // shape.BS)
    overlap = overlap_weights(shape.length, shape.stride, shape.BS, num_blocks, device)
    exact = importance(
        q.double(), k_cmp.double(), rows, overlap=overlap, scale=shape.D**-0.5
    ).flatten(0, 1)  # [R, H, NB]

    C, shares = handed_over["C"], handed_over["SHARES"]
    R, H = exact.shape[:2]
    scores = handed_over["scores"].double()
    scores = scores[: scores.numel() // (shares * R * H) * shares * R * H].view(shares, R, H, -1)
    num_visible = rows.num_visible.view(R, 1, 1)
    is_cell = torch.arange(scores.shape[-1], device=device) < -(-num_visible // C)
    scores = scores.masked_fill(~is_cell, 0)  # the rest is not written
    found = torch.zeros_like(exact)
    if C > 1:
        for share, block in ((s, b) for s in range(shares) for b in range(num_blocks)):
            if 0 <= block - share < scores.shape[-1]:
                found[..., block] += scores[share, ..., block - share]
    else:
        for block, (first, weights) in enumerate(zip(*overlap, strict=True)):
            for i, weight in enumerate(weights):
                if 0 <= first + i < scores.shape[-1]:
                    found[..., block] += scores[0, ..., first + i] * weight
    assert torch.allclose(found, exact, atol=1e-5)
    is_apart = shape.cu is None and (shape.B == 1 or shape.N % score_cells.TILE == 0)
    assert (C > 1) == (is_apart and shape.BS % shape.stride == shape.length % shape.stride == 0)


# -- what the pick kernel makes of it --


def pick(
    scores: Tensor, position: Tensor, top_n: int, num_initial: int, num_local: int,
    counts: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The kernel on scores `[R, H, NB]` of blocks: a block is a token, and a summary, too."""
    R, H, NB = scores.shape
    position = position.to(torch.int32)
    ids = torch.full((R, H, top_n), -7, dtype=torch.int32, device=scores.device)
    num_blocks = 1 << (NB - 1).bit_length()
    options = pick_options(num_blocks)
    pick_kernel[(-(-R * H // options["BR"]),)](
        scores.contiguous(), position + 1, position, counts, ids, R, 0, H, NB, top_n, num_initial,
        num_local, 1, 1, BS=1, C=1, SHARES=1, K=1, NB=num_blocks, HAS_COUNTS=counts is not None,
        NT=1 << (top_n - 1).bit_length(), **options,
    )  # fmt: skip
    return ids


def assert_picked(scores: Tensor, position: Tensor, *sizes: int, counts: Tensor | None = None):
    """The lists of `block_selection.choose` for the same scores: these are exact."""
    names = ("top_n", "num_initial", "num_local")
    future = torch.arange(scores.shape[-1], device=scores.device) > position[:, None, None]
    right = choose(
        scores.masked_fill(future, 0)[None],
        position,
        **dict(zip(names, sizes, strict=True)),
        block_counts=None if counts is None else counts[None],
    )[0]
    assert torch.equal(pick(scores, position, *sizes, counts), right)


SCORES = {
    "any": lambda shape, g: torch.rand(shape, generator=g),
    "many ties": lambda shape, g: torch.randint(0, 4, shape, generator=g) / 3,
    "nothing but zeros": lambda shape, g: torch.zeros(shape),
    "all equal": lambda shape, g: torch.full(shape, 0.3),
    "bits apart": lambda shape, g: 1 + torch.randint(0, 9, shape, generator=g) * 2**-23,
    "of all sizes": lambda shape, g: torch.exp(60 * torch.randn(shape, generator=g)).clamp(0, 3e38),
    "tiny": lambda shape, g: torch.randint(0, 9, shape, generator=g) * 2.0**-149,
    "NaN among them": lambda shape, g: torch.rand(shape, generator=g).masked_fill(
        torch.rand(shape, generator=g) < 0.3, torch.nan
    ),
}


# top_n, num_initial, num_local, and whether rows have counts: each for two kinds of scores
PICKED = [(7, 1, 2, False), (5, 0, 0, False), (30, 2, 3, False), (7, 1, 2, True)]


@on_devices("case", {name: (name, PICKED[i % 4]) for i, name in enumerate(SCORES)})
def test_picks_are_exact(case: tuple[str, tuple[int, ...]], device: str) -> None:
    """Also where scores differ in their last bit, and where more are equal than are wanted."""
    skip_unless_runs("triton", device)
    g = torch.Generator().manual_seed(0)
    name, (*sizes, has_counts) = case
    R, H, NB = 6, 3, 23  # of 16 lists a program
    scores = SCORES[name]((R, H, NB), g).float().to(device)
    position = torch.randint(0, NB, (R,), generator=g).to(device)
    position[0], position[-1] = 0, NB - 1
    counts = torch.randint(0, 9, (R, H), generator=g).to(device) if has_counts else None
    assert_picked(scores, position, *sizes, counts=counts)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_pick(data: st.DataObject) -> None:
    NB = data.draw(st.integers(1, 20))
    few = st.lists(st.floats(0, 8, width=32), min_size=NB, max_size=NB)
    scores = torch.tensor(data.draw(few)).view(1, 1, NB)
    forced = data.draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    top_n = data.draw(st.integers(max(1, sum(forced)), 9))
    position = torch.tensor([data.draw(st.integers(0, NB - 1))])
    assert_picked(scores, position, top_n, *forced)


@on_devices("NB", {"65": 65, "2049": 2049})
def test_many_blocks(NB: int, device: str) -> None:
    """Of which a program makes fewer lists, and then one."""
    skip_unless_runs("triton", device)
    g = torch.Generator().manual_seed(0)
    scores = torch.randint(0, NB // 2, (3, 2, NB), generator=g).float().to(device)
    position = torch.tensor([NB - 1, NB // 2, NB - 2], device=device)
    assert_picked(scores, position, 16, 1, 2)


@pytest.mark.exhaustive  # the picks above have as many blocks
@devices
def test_a_long_sequence(device: str) -> None:
    """More than 2048 blocks, from queries to lists."""
    skip_unless_runs("triton", device)
    shape = Shape(N=2, M=4300, H=1, G=2, D=8, length=2, stride=1, BS=2)
    q, k_cmp, sizes = inputs_of(shape, device)
    ids = ops.select_blocks(3 * q, k_cmp, **sizes)
    exact = ops.select_blocks(3 * q.double(), k_cmp.double(), **sizes | {"backend": "reference"})
    assert torch.equal(ids, exact)


# -- chunks --

CHUNKED = {
    "cells": Shape(N=160, M=170, H=1, G=1, D=8, length=4, stride=2, BS=16),
    "a batch of whole tiles": Shape(B=2, N=128, M=150, H=1, G=1, D=8, length=4, stride=2, BS=16),
    "packed": Shape(N=160, M=160, H=1, G=1, D=8, length=4, stride=2, BS=16, cu=(0, 40, 70, 160)),
    "a batch of three queries": Shape(B=2, N=3, M=50, H=1, G=1, D=8, length=4, stride=2, BS=16),
}
ON_THE_CPU = {"cells": 150, "a batch of whole tiles": 100, "packed": 100}


@pytest.mark.parametrize(
    ("name", "rows", "device"),
    [("a batch of three queries", 1, "cpu")]
    + [pytest.param(name, rows, "cpu", marks=[] if name == "cells" else pytest.mark.exhaustive)
       for name, rows in ON_THE_CPU.items()]
    + [pytest.param(name, rows, "cuda", marks=pytest.mark.gpu)
       for name in ON_THE_CPU for rows in (1, 100, 128, 150)],
)  # fmt: skip
def test_chunks_of_queries(
    name: str, rows: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores of so many rows fit the workspace: the choice is the same to the bit."""
    skip_unless_runs("triton", device)
    shape = CHUNKED[name]
    q, k_cmp, sizes = inputs_of(shape, device)
    counts = (torch.arange(shape.B * shape.N, device=device) % 6).view(shape.B, shape.N, 1)
    whole = ops.select_blocks(q, k_cmp, **sizes, top_n=5, block_counts=counts)
    is_apart = shape.cu is None and (shape.B == 1 or shape.N % score_cells.TILE == 0)
    cells = score_cells.cells_of(
        shape.M, length=shape.length, stride=shape.stride, block_size=shape.BS, is_apart=is_apart
    )
    per_row = 4 * cells.shares * shape.H * cells.per_row
    monkeypatch.setattr(score_cells, "WORKSPACE", rows * per_row + per_row // 2)
    assert score_cells.rows_of_a_chunk(cells, shape.B * shape.N, shape.H) < shape.B * shape.N
    chunked = ops.select_blocks(q, k_cmp, **sizes, top_n=5, block_counts=counts)
    assert torch.equal(chunked, whole)


def test_the_workspace_is_bounded() -> None:
    """At most its bytes, as long as one row fits; and no chunk begins inside of a tile, which
    might then have rows of two sequences."""
    TILE = score_cells.TILE
    for M, H in ((2048, 1), (65_536, 4), (1 << 20, 8), (1 << 22, 12)):
        for is_apart in (True, False):
            sizes = {"length": 32, "stride": 16, "block_size": 64, "is_apart": is_apart}
            cells = score_cells.cells_of(M, **sizes)
            rows = score_cells.rows_of_a_chunk(cells, M, H)
            assert 4 * rows * H * cells.per_row * cells.shares <= score_cells.WORKSPACE
            assert rows == M or rows % TILE == 0 or TILE % rows == 0


@settings(max_examples=100, deadline=None, derandomize=True)
@given(length=st.integers(1, 40), stride=st.integers(1, 20), block_size=st.integers(1, 80),
       M=st.integers(1, 300))  # fmt: skip
def test_cells_hold_all_summaries(length: int, stride: int, block_size: int, M: int) -> None:
    """Every summary has a cell in every row, its last token lies in a block of its cell's shares,
    and no block has more summaries than are looked at."""
    sizes = {"length": length, "stride": stride, "block_size": block_size}
    last = num_summaries(M, length, stride) - 1
    for is_apart in (True, False):
        cells = score_cells.cells_of(M, **sizes, is_apart=is_apart)
        assert cells.per_row * cells.size > last
        assert cells.num_blocks * block_size >= M
        assert cells.num_blocks & (cells.num_blocks - 1) == 0
        if cells.size > 1:
            for summary in range(last + 1):
                own = summary // cells.size
                assert summary * stride // block_size == own
                end = (summary * stride + length - 1) // block_size
                assert own <= end < own + cells.shares
        weights = overlap_weights(length, stride, block_size, -(-M // block_size)).weights
        assert weights.shape[1] <= cells.overlapping


# -- tiles --


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("D", [16, 64, 128, 192, 256])
def test_what_a_program_holds_fits(D: int, itemsize: int) -> None:
    width = tile_sizes(1, D, D)["DT"] * itemsize
    options = attend_options(D, D, itemsize)
    rows = options["BQ"] + 2 * options["num_stages"] * options["BT"]
    assert rows * width <= SHARED_MEMORY
    options = score_options(D, itemsize)
    assert (options["num_stages"] * options["BQ"] + options["BT"]) * width <= SHARED_MEMORY
    # chunks, and the sequences of a batch that has cells, begin with a tile
    assert score_cells.TILE % options["BQ"] == 0
    assert options["BT"] % score_cells.LARGEST_CELL == 0


# -- on a GPU --


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_same_bits_every_time(dtype: torch.dtype) -> None:
    """Outputs, choices and gradients."""
    shape = Shape(N=5000, M=5000, H=1, G=16, D=64, DV=64, length=32, stride=16, BS=64)
    q, k, v = (x.cuda() for x in shape.make(dtype))
    inputs = [x.requires_grad_() for x in (q, k[:, :311], v[:, :311])]

    def run() -> list[Tensor]:
        o, lse = ops.compressed_attention(*inputs, return_lse=True, backend="triton")
        ids = ops.select_blocks(*inputs[:2], lse, backend="triton")
        d = (torch.ones_like(o), lse.isfinite().float())
        return [o, lse, ids, *torch.autograd.grad((o, lse), inputs, d)]

    first = run()
    assert all(torch.equal(a, b) for _ in range(3) for a, b in zip(run(), first, strict=True))


@pytest.mark.gpu
def test_queries_past_32_bits() -> None:
    """2.3e9 numbers: the last queries are what they are alone."""
    N, HQ, D, last = 140_000, 64, 256, 200
    sizes = {"length": 32, "stride": 4096, "num_keys": N, "backend": "triton"}
    q = torch.randn(1, N, HQ, D, dtype=torch.float16, device="cuda")
    assert q.numel() > 2**31
    M_c = num_summaries(N, 32, 4096)
    k, v = torch.randn(2, 1, M_c, 4, D, dtype=torch.float16, device="cuda").unbind()
    pick = {"block_size": 4096, "top_n": 8}
    o, lse = ops.compressed_attention(q, k, v, **sizes, return_lse=True)
    ids = ops.select_blocks(q, k, lse, **sizes, **pick)
    few = q[:, -last:].contiguous()
    o_few, lse_few = ops.compressed_attention(few, k, v, **sizes, return_lse=True)
    torch.testing.assert_close(o[:, -last:], o_few)
    torch.testing.assert_close(lse[:, -last:], lse_few)
    ids_few = ops.select_blocks(few, k, lse_few, **sizes, **pick)
    assert (ids[:, -last:] == ids_few).all(-1).float().mean() > 0.999
    del o, ids
    leaf, k, v = (x.requires_grad_() for x in (q, k, v))
    o = ops.compressed_attention(leaf, k, v, **sizes)
    d_o = torch.zeros_like(o)
    d_o[:, -last:] = 1
    d_q, d_k, d_v = torch.autograd.grad(o, (leaf, k, v), d_o)
    few.requires_grad_()
    o_few = ops.compressed_attention(few, k, v, **sizes)
    right = torch.autograd.grad(o_few, (few, k, v), torch.ones_like(o_few))
    torch.testing.assert_close((d_q[:, -last:], d_k, d_v), right, atol=1e-2, rtol=1e-2)


@pytest.mark.gpu
def test_summaries_past_32_bits() -> None:
    """2.2e9 numbers: the last head is what it is alone."""
    M, H, D = 134_000, 64, 256
    sizes = {"length": 1, "stride": 1, "num_keys": M, "backend": "triton"}
    k = torch.randn(1, M, H, D, dtype=torch.float16, device="cuda")
    assert k.numel() > 2**31
    q = torch.randn(1, 4, H, D, dtype=torch.float16, device="cuda", requires_grad=True)
    pick = {"block_size": 64, "top_n": 8}
    o, lse = ops.compressed_attention(q, k, k, **sizes, return_lse=True)
    ids = ops.select_blocks(q, k, lse, **sizes, **pick)
    alone = q[:, :, -1:].contiguous(), k[:, :, -1:].contiguous()
    o_alone, lse_alone = ops.compressed_attention(*alone, alone[1], **sizes, return_lse=True)
    torch.testing.assert_close(o[:, :, -1:], o_alone)
    torch.testing.assert_close(lse[..., -1:], lse_alone)
    assert torch.equal(ids[:, :, -1:], ops.select_blocks(*alone, lse_alone, **sizes, **pick))
    (d_q,) = torch.autograd.grad(o.float().square().sum(), q)
    (right,) = torch.autograd.grad(o_alone.float().square().sum(), q)
    torch.testing.assert_close(d_q[:, :, -1:], right[:, :, -1:], atol=1e-3, rtol=1e-2)
