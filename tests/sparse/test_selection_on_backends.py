"""The choice of blocks on every backend: the reference's in fp64, but for blocks that are worth the
same within rounding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from branches import Shape
from places import places_of, product, skip_unless_runs
from test_block_selection import PICKS
from test_block_selection import SHAPES as GEOMETRIES
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.sparse.block_selection import importance, overlap_weights
from nsa_tutorial.sparse.compression import summary_rows
from nsa_tutorial.sparse.selected_attention import query_rows

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, in the interpreter
]

BACKENDS = ["reference", "tilelang", "triton"]
places = places_of(BACKENDS)
# TileLang compiles kernels of their own for these shapes.
places_but_slowest = places_of(BACKENDS, slow=["tilelang"])

# What kernels do with scores depends on whether blocks and summaries are whole strides: then they
# add up what begins in one block, and what reaches into the next one, two or more.
LATE = {  # the last queries of the texts: kernels are interpreted
    name: x if x.cu else replace(x, N=min(x.N, 9)) for name, x in GEOMETRIES.items()
}
SHAPES = LATE | {
    "a summary is a stride": Shape(N=40, M=40, length=2, stride=2, BS=8),
    "a summary of three strides": Shape(N=40, M=40, length=6, stride=2, BS=8),
    "a summary of a block": Shape(N=40, M=40, length=8, stride=2, BS=8),
    "a summary of a block and a stride": Shape(N=20, M=40, length=10, stride=2, BS=8),
    "a summary of two blocks": Shape(N=40, M=40, length=16, stride=2, BS=8),
    "two strides a block": Shape(N=40, M=40, length=6, stride=2, BS=4),
    "16 strides a block": Shape(N=9, M=100, G=1, length=5, stride=1, BS=16),
    "32 strides a block": Shape(N=100, M=100, G=1, length=5, stride=1, BS=32),
    "three strides a block": Shape(N=40, M=40, length=4, stride=2, BS=6),
    "a batch of odd lengths": Shape(B=3, N=17, M=17, G=1, D=16, length=4, stride=2, BS=8),
    "a batch of whole tiles": Shape(B=2, N=128, M=128, G=1, D=16, length=4, stride=2, BS=8),
    "a batch that decodes": Shape(B=3, N=1, M=90, length=4, stride=2, BS=8),
    "a batch, a few queries": Shape(B=2, N=5, M=90, length=4, stride=2, BS=8),
    "packed, whole strides": Shape(
        N=140, M=140, G=1, length=4, stride=2, BS=8, cu=(0, 3, 3, 60, 140)
    ),
    "packed, one sequence": Shape(N=40, M=40, length=4, stride=2, BS=8, cu=(0, 40)),
    "group of 20": Shape(N=5, M=40, H=1, G=20, length=4, stride=2, BS=8),
    "width 192": Shape(N=40, M=40, G=1, D=192, length=4, stride=2, BS=8),
    "three tiles of queries": Shape(N=300, M=300, G=1, D=16, length=2, stride=1, BS=4),
}
QUICK = {
    torch.float32: [
        "nothing divides anything",
        "more keys than queries",
        "stride longer than length",
        "summaries longer than blocks",
        "fewer keys than a summary",
        "packed, one empty, one too short",
        "a summary of a block and a stride",
        "16 strides a block",
        "a batch of odd lengths",
        "a batch of whole tiles",
        "packed, whole strides",
        "group of 20",
        "three tiles of queries",
    ],
    torch.float16: ["more keys than queries"],
    torch.bfloat16: ["packed, whole strides"],
}
# TileLang compiles its kernels for every geometry, and Triton interprets them
SLOW = {
    "tilelang": [
        "nothing divides anything",
        "packed, one empty, one too short",
    ],
    "triton": [
        "nothing divides anything",
        "more keys than queries",
        "stride longer than length",
        "summaries longer than blocks",
        "fewer keys than a summary",
        "packed, one empty, one too short",
        "a summary of a block and a stride",
        "16 strides a block",
        "a batch of odd lengths",
        "packed, whole strides",
        "group of 20",
    ],
}
# of what is not about shapes: few kernels to compile
SMALL = Shape(N=12, M=50, G=2, D=16, length=4, stride=2, BS=8)
PACKED = replace(SMALL, N=24, M=24, cu=(0, 3, 14, 24))
CASES = {
    f"{name}, {pick}": (shape, PICKS[pick]) for name, shape in SHAPES.items() for pick in PICKS
}


def named(cases: Iterable[str], first: int = 0) -> list[str]:
    """Every shape with one of the picks, in turn; `first` is the first one's."""
    picks = list(PICKS)
    turn = {name: picks[(i + first) % len(picks)] for i, name in enumerate(SHAPES)}
    return [f"{case}, {turn[case]}" for case in cases]


def inputs_of(shape: Shape, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Queries, and as many summaries as the keys have: random ones, whose scores differ more than
    those of means."""
    q, k, _ = shape.make(dtype)
    return [q.to(device), k[:, : len(shape.summaries())].to(device)]


def options_of(shape: Shape, device: str) -> dict[str, object]:
    cu_seqlens = None if shape.cu is None else shape.offsets.to(device)
    sizes = {"length": shape.length, "stride": shape.stride, "num_keys": shape.M}
    return sizes | {"cu_seqlens": cu_seqlens}


def pick_of(numbers: tuple[int, int, int]) -> dict[str, int]:
    return dict(zip(("top_n", "num_initial", "num_local"), numbers, strict=True))


def exact_scores(shape: Shape, q: Tensor, k_cmp: Tensor, pool: str = "sum") -> Tensor:
    """What each block is worth to each row, `[B, N, H, NB]` in fp64."""
    cu_seqlens = options_of(shape, q.device.type)["cu_seqlens"]
    where = {"cu_seqlens": cu_seqlens, "device": q.device}
    rows = query_rows(shape.B, shape.N, shape.M, causal=True, **where)
    sizes = {"length": shape.length, "stride": shape.stride}
    rows = summary_rows(rows, shape.M, **sizes, cu_seqlens=cu_seqlens)
    num_blocks = -(-shape.M // shape.BS)
    overlap = overlap_weights(shape.length, shape.stride, shape.BS, num_blocks, q.device)
    scale = shape.D**-0.5
    options = {"overlap": overlap, "scale": scale, "pool": pool}
    return importance(q.double(), k_cmp.double(), rows, **options)


def taken(ids: Tensor, num_blocks: int) -> Tensor:
    """Which blocks lists hold, bool `[B, N, H, NB]`."""
    holds = torch.zeros(*ids.shape[:-1], num_blocks + 1, dtype=torch.bool, device=ids.device)
    place = torch.where(ids < 0, num_blocks, ids).long()
    return holds.scatter_(-1, place, True)[..., :-1]


def assert_same_choice(ids: Tensor, exact: Tensor, score: Tensor, rounding: float = 1e-5) -> None:
    """Lists `ids` are well-formed, and hold what `exact` does; where they do not, what changed
    places is worth the same, but for `rounding`.

    Args:
        ids, exact: `[B, N, H, top_n]`.
        score: `[B, N, H, NB]`, what each block is worth.
        rounding: relative to the block that is worth more.
    """
    assert (ids.shape, ids.dtype) == (exact.shape, torch.int32)
    num_blocks = score.shape[-1]
    assert torch.equal(ids < 0, exact < 0), "lists are of another length"
    order = torch.where(ids < 0, num_blocks + torch.arange(ids.shape[-1]).to(ids), ids)
    assert (order.diff(dim=-1) > 0).all(), "not distinct and ascending"
    assert ((ids >= -1) & (ids < num_blocks)).all()
    has, right = taken(ids, num_blocks), taken(exact, num_blocks)
    missed = score.masked_fill(~(right & ~has), -torch.inf).amax(-1)
    instead = score.masked_fill(~(has & ~right), torch.inf).amin(-1)
    gap = (missed - instead).masked_fill(~missed.isfinite(), 0)
    is_wrong = gap > rounding * missed.clamp(min=0) + 1e-30  # kernels take tiny numbers for 0
    assert not is_wrong.any(), (
        f"rows {is_wrong.nonzero()[:3].tolist()}: {ids[is_wrong][:3].tolist()}, expected "
        f"{exact[is_wrong][:3].tolist()}"
    )


@product(
    "case",
    CASES,
    BACKENDS,
    {dtype: named(cases) for dtype, cases in QUICK.items()},
    slow={backend: named(cases) for backend, cases in SLOW.items()},
    rest={backend: named(SHAPES, i) for i, backend in enumerate(BACKENDS)},
)
def test_the_choice(
    case: tuple[Shape, tuple[int, int, int]], dtype: torch.dtype, backend: str, device: str
) -> None:
    skip_unless_runs(backend, device, dtype)
    shape, numbers = case
    q, k_cmp = inputs_of(shape, dtype, device)
    options = options_of(shape, device)
    exact = [q.double(), k_cmp.double()]
    _, lse = ops.compressed_attention(*exact, exact[1], **options, return_lse=True)
    options |= pick_of(numbers) | {"block_size": shape.BS}
    ids = ops.select_blocks(q, k_cmp, lse.float(), **options, backend=backend)
    right = ops.select_blocks(*exact, **options)
    rounding = 1e-5 * max(1, shape.magnitude)
    assert_same_choice(ids, right, exact_scores(shape, q, k_cmp), rounding)
    ops.check_block_indices(ids, shape.M, block_size=shape.BS, cu_seqlens=options["cu_seqlens"])


@places_but_slowest
def test_without_a_log_sum_exp(backend: str, device: str) -> None:
    skip_unless_runs(backend, device)
    for shape in (SMALL, PACKED):
        q, k_cmp = inputs_of(shape, torch.float32, device)
        options = options_of(shape, device) | {"top_n": 5, "block_size": shape.BS}
        ids = ops.select_blocks(q, k_cmp, **options, backend=backend)
        right = ops.select_blocks(q.double(), k_cmp.double(), **options)
        assert_same_choice(ids, right, exact_scores(shape, q, k_cmp))


POOLED = {
    name: SHAPES[name]
    for name in (
        "nothing divides anything",
        "stride longer than length",
        "blocks of one token",
        "packed, whole strides",
        "16 strides a block",
    )
} | {"tokens": Shape(N=20, M=40, length=1, stride=1, BS=8)}


@product(
    "shape", POOLED, BACKENDS, {torch.float32: ["tokens", "packed, whole strides"]},
    dtypes=[torch.float32], slow={"tilelang": []},
)  # fmt: skip
def test_the_choice_by_maxima(shape: Shape, dtype: torch.dtype, backend: str, device: str) -> None:
    """Of what the reference says in fp64, which is a maximum over the summaries of a block."""
    skip_unless_runs(backend, device, dtype)
    q, k_cmp = inputs_of(shape, dtype, device)
    options = options_of(shape, device) | {"top_n": 4, "block_size": shape.BS, "pool": "max"}
    ids = ops.select_blocks(q, k_cmp, **options, backend=backend)
    right = ops.select_blocks(q.double(), k_cmp.double(), **options)
    assert_same_choice(ids, right, exact_scores(shape, q, k_cmp, "max"))
    if shape.stride == shape.length == 1 and shape.cu is None:  # by hand
        position = torch.arange(shape.M - shape.N, shape.M, device=device)
        is_seen = torch.arange(shape.M, device=device) <= position[:, None]
        s = torch.einsum("bnhgd,bmhd->bhgnm", q.unflatten(2, (shape.H, shape.G)), k_cmp)
        p = (s * shape.D**-0.5).masked_fill(~is_seen, -torch.inf).softmax(-1).sum(2)
        best = p.unflatten(-1, (-1, shape.BS)).amax(-1).transpose(1, 2)
        torch.testing.assert_close(exact_scores(shape, q, k_cmp, "max").float(), best)


COUNTED = {
    name: SHAPES[name]
    for name in (
        "nothing divides anything",
        "a batch of whole tiles",
        "packed, whole strides",
        "a batch that decodes",
        "stride longer than length",
    )
}
QUICK_COUNTS = ["nothing divides anything", "stride longer than length", "a batch that decodes"]


@product(
    "shape", COUNTED, BACKENDS, {torch.float32: QUICK_COUNTS}, dtypes=[torch.float32],
    slow={"tilelang": []},  # judges them with the choice, above
)  # fmt: skip
def test_each_row_keeps_as_many_as_it_counts(
    shape: Shape, dtype: torch.dtype, backend: str, device: str
) -> None:
    """Also none, fewer than are forced, and more than the list holds."""
    skip_unless_runs(backend, device, dtype)
    q, k_cmp = inputs_of(shape, dtype, device)
    g = torch.Generator().manual_seed(1)
    counts = torch.randint(0, 8, (shape.B, shape.N, shape.H), generator=g).to(device)
    options = options_of(shape, device) | {"top_n": 5, "block_size": shape.BS}
    counts = counts.int() if shape.cu is None else counts
    options |= {"block_counts": counts}
    ids = ops.select_blocks(q, k_cmp, **options, backend=backend)
    exact = ops.select_blocks(q.double(), k_cmp.double(), **options)
    assert_same_choice(ids, exact, exact_scores(shape, q, k_cmp))


# of TileLang, kernels/tilelang asks it of kernels that are compiled anyway
@places_but_slowest
@pytest.mark.parametrize(
    ("length", "stride", "BS"),
    [
        (10, 2, 8),  # of one of the shapes above
        pytest.param(32, 16, 64, marks=pytest.mark.exhaustive),
        pytest.param(6, 3, 9, marks=pytest.mark.exhaustive),
    ],
)
def test_of_equal_blocks_the_first(
    length: int, stride: int, BS: int, backend: str, device: str
) -> None:
    """Queries of zero attend to all summaries alike: inner blocks are equal to the last bit, and
    the lower ids are taken."""
    skip_unless_runs(backend, device)
    M = 8 * BS
    shape = Shape(N=3, M=M, length=length, stride=stride, BS=BS)
    q, k_cmp = inputs_of(shape, torch.float32, device)
    options = options_of(shape, device) | {"block_size": BS, "top_n": 6, "num_initial": 1}
    ids = ops.select_blocks(torch.zeros_like(q), k_cmp, **options, backend=backend)
    assert (ids[:, -1] == torch.tensor([0, 1, 2, 3, 6, 7], device=device)).all()
    assert torch.equal(ids, ids[:, -1:].expand_as(ids))


@places_but_slowest
def test_one_choice_for_a_group(backend: str, device: str) -> None:
    """By the sum over its heads: one of them is almost sure of block 1, the others all lean to
    block 2."""
    skip_unless_runs(backend, device)
    q, k_cmp = torch.zeros(1, 24, 6, 16, device=device), torch.zeros(1, 6, 2, 16, device=device)
    k_cmp[0, :4, 0, :4] = k_cmp[0, :4, 1, :4] = torch.eye(4, device=device)
    q[..., 0, 1], q[..., 1:3, 2], q[..., 3:, 3] = 30.0, 8.0, 5.0
    pick = {"top_n": 1, "block_size": 4, "length": 4, "stride": 4, "num_initial": 0, "num_local": 0}
    ids = ops.select_blocks(q, k_cmp, **pick, backend=backend)
    assert ids[0, -1].tolist() == [[2], [3]]
    alone = ops.select_blocks(q[:, :, [0, 3]], k_cmp, **pick, backend=backend)
    assert alone[0, -1].tolist() == [[1], [3]]


@places_but_slowest
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(SMALL, id="one sequence", marks=pytest.mark.exhaustive),
        pytest.param(PACKED, id="packed"),
    ],
)
def test_nan_reaches_those_who_see_it(shape: Shape, backend: str, device: str) -> None:
    """NaN in a summary or in a query: others choose the same to the bit, and those who see it keep
    the forced blocks, and lists without a hole."""
    skip_unless_runs(backend, device)
    q, k_cmp = inputs_of(shape, torch.float32, device)
    options = options_of(shape, device) | {"top_n": 5, "block_size": 8, "backend": backend}
    before = ops.select_blocks(q, k_cmp, **options)
    key, query = (20, 7) if shape.cu is None else (5, 20)
    sees_summary = shape.seen_summaries()[:, key].to(device)
    is_query = torch.arange(shape.N, device=device) == query
    spoil_key, spoil_query = k_cmp.clone(), q.clone()
    spoil_key[0, key, 0, 3] = torch.nan
    spoil_query[0, query, 0, 3] = torch.inf
    for pair, sees in (((q, spoil_key), sees_summary), ((spoil_query, k_cmp), is_query)):
        assert sees.any() and not sees.all()
        after = ops.select_blocks(*pair, **options)
        assert torch.equal(after[0, :, 1], before[0, :, 1])  # the other head
        assert torch.equal(after[0, ~sees], before[0, ~sees])
        assert torch.equal(after < 0, before < 0)
        ops.check_block_indices(after, shape.M, block_size=8, cu_seqlens=options["cu_seqlens"])
        for n, _, position in shape.queries():
            own = position // 8
            assert all({0, max(own - 1, 0), own} <= set(row) for row in after[0, n].tolist())


@places_but_slowest
@pytest.mark.parametrize(
    ("N", "M"),
    [
        pytest.param(12, 50, id="one tile"),
        pytest.param(150, 150, id="several tiles", marks=pytest.mark.exhaustive),
    ],
)
def test_nothing_leaks_from_the_future(N: int, M: int, backend: str, device: str) -> None:
    skip_unless_runs(backend, device)
    shape = replace(SMALL, N=N, M=M)
    q, k_cmp = inputs_of(shape, torch.float32, device)
    options = options_of(shape, device) | {"top_n": 5, "block_size": shape.BS, "num_local": 0}
    before = ops.select_blocks(q, k_cmp, **options, backend=backend)
    late = 41 - (M - N)
    q[:, late:], k_cmp[:, 19:] = torch.nan, torch.nan  # summary 19 ends with token 41
    after = ops.select_blocks(q, k_cmp, **options, backend=backend)
    assert torch.equal(before[:, :late], after[:, :late])


@places_of(BACKENDS, slow=["tilelang", "triton"])  # their packed shapes are judged above
def test_packed_sequences_are_separate_calls(backend: str, device: str) -> None:
    skip_unless_runs(backend, device)
    q, k_cmp = inputs_of(PACKED, torch.float32, device)
    pick = {"top_n": 5, "block_size": 8, "backend": backend}
    ids = ops.select_blocks(q, k_cmp, **options_of(PACKED, device), **pick)
    score = exact_scores(PACKED, q, k_cmp)
    first = 0
    for start, end in PACKED.bounds:
        part = replace(PACKED, N=end - start, M=end - start, cu=None)
        of_part = slice(first, first + len(part.summaries()))
        first = of_part.stop
        few = (q[:, start:end], k_cmp[:, of_part])
        alone = ops.select_blocks(*few, **options_of(part, device), **pick)
        assert_same_choice(ids[:, start:end], alone, score[:, start:end])


@places_but_slowest
def test_more_slots_than_blocks(backend: str, device: str) -> None:
    skip_unless_runs(backend, device)
    shape = replace(SMALL, N=12, M=12)
    q, k_cmp = inputs_of(shape, torch.float32, device)
    options = options_of(shape, device) | {"top_n": 9, "backend": backend}
    ids = ops.select_blocks(q, k_cmp, **options, block_size=8)
    assert ids[0, -1, 0].tolist() == [0, 1] + [-1] * 7
    ids = ops.select_blocks(q, k_cmp, **options, block_size=64)  # longer than the sequence
    assert (ids == torch.tensor([0] + [-1] * 8, device=device)).all()


@places
@pytest.mark.parametrize(("B", "N"), [(0, 9), (1, 0)], ids=["no sequence", "no query"])
def test_nothing_to_do(B: int, N: int, backend: str, device: str) -> None:
    skip_unless_runs(backend, device)
    shape = Shape(B=B, N=N, M=9)
    q, k_cmp = inputs_of(shape, torch.float32, device)
    options = options_of(shape, device) | {"top_n": 4, "block_size": 4, "backend": backend}
    assert ops.select_blocks(q, k_cmp, **options).shape == (B, N, 2, 4)


@places_but_slowest
def test_other_strides(backend: str, device: str) -> None:
    """Heads before positions, a log-sum-exp and counts among them."""
    skip_unless_runs(backend, device)
    shape = replace(SMALL, B=2, N=9, M=20)
    q, k_cmp = inputs_of(shape, torch.float32, device)
    options = options_of(shape, device)
    _, lse = ops.compressed_attention(q, k_cmp, k_cmp, **options, return_lse=True)
    counts = (torch.arange(18, device=device) % 6).view(2, 9, 1).expand(2, 9, 2)
    options |= {"top_n": 5, "block_size": 8, "backend": backend}
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k_cmp, lse)]
    assert not any(x.is_contiguous() for x in (*strided, counts))
    ids = ops.select_blocks(*strided, **options, block_counts=counts)
    right = ops.select_blocks(q, k_cmp, lse, **options, block_counts=counts.contiguous())
    assert torch.equal(ids, right)


@pytest.mark.gpu
@pytest.mark.parametrize("N", [2048, 8192])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["triton", "tilelang"])
def test_end_to_end(backend: str, dtype: torch.dtype, N: int) -> None:
    """All of native sparse attention, choice included: where kernels and reference chose the same
    blocks, the outputs and the gradients agree; elsewhere, what they chose is worth the same."""
    skip_unless_runs(backend, "cuda", dtype)
    shape = Shape(N=N, M=N, H=2, G=8, D=64, DV=64, length=32, stride=16, BS=64)
    q, k, v = (x.cuda() for x in shape.make(dtype))
    g = torch.Generator().manual_seed(1)
    gates = [torch.rand(1, N, 16, generator=g).cuda().to(dtype) for _ in range(3)]
    k_cmp = ops.compress(k)
    options = {"top_n": 16, "num_keys": N}
    chosen = {b: ops.select_blocks(q, k_cmp, **options, backend=b) for b in (backend, "reference")}
    score = exact_scores(shape, q, k_cmp)
    assert_same_choice(chosen[backend], chosen["reference"], score, 1e-4)
    same = (chosen[backend] == chosen["reference"]).all(-1)  # [1, N, 2]
    assert same.float().mean() > 0.99
    d_o = torch.randn(1, N, 16, 64, generator=g).cuda().to(dtype)
    d_o = d_o * same.all(-1)[..., None, None]

    def run(backend: str) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v, *gates)]
        o = ops.native_sparse_attention(*leaves, backend=backend)
        return [(o * same.all(-1)[..., None, None]), *torch.autograd.grad(o, leaves, d_o)]

    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    for found, right in zip(run(backend), run("reference"), strict=True):
        error = (found.double() - right.double()).abs().max()
        assert error < tolerance * right.double().abs().max()
