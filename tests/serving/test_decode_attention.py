"""Attention of the newest tokens to a cache: what the operators over whole sequences give for the
same queries, row by row, on every backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from places import dtypes, places_of, skip_unless_runs
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.sparse.decoding import places

BACKENDS = ("reference", "tilelang", "triton")
kernels = pytest.mark.parametrize("backend", BACKENDS[1:])
SIZES = {"block_size": 8, "window_size": 11, "length": 6, "stride": 4}


@dataclass(frozen=True)
class Shape:
    n: int = 1
    HQ: int = 6
    H: int = 2
    D: int = 8
    DV: int = 12
    page_size: int | None = None
    lengths: tuple[int, ...] = (70, 23)
    top_n: int = 4


@dataclass
class Problem:
    """A cache of whole sequences, and what the operators over whole sequences say of it."""

    q: Tensor
    tokens: list[tuple[Tensor, Tensor]]  # of compression, selection and window, [B, M, H, ...]
    gates: list[Tensor | None]
    shape: Shape

    def to(self, device: str, dtype: torch.dtype) -> Problem:
        def move(x: Tensor) -> Tensor:
            return x.to(device, dtype)

        gates = [g if g is None else move(g) for g in self.gates]
        tokens = [(move(k), move(v)) for k, v in self.tokens]
        return Problem(move(self.q), tokens, gates, self.shape)

    def whole(self, block_indices: Tensor | None = None) -> Tensor:
        """Row by row, by `three_branches` on the reference."""
        rows = []
        for b, M in enumerate(self.shape.lengths):
            n = min(self.shape.n, M)
            row = slice(b, b + 1)
            (k, v), *others = [(k[row, :M], v[row, :M]) for k, v in self.tokens]
            summaries = [ops.compress(x, length=6, stride=4, backend="reference") for x in (k, v)]
            gates = [g if g is None else g[row, self.shape.n - n :] for g in self.gates]
            ids = None if block_indices is None else block_indices[row, self.shape.n - n :]
            o = torch.zeros_like(self.q[row, :, :, :1].expand(-1, -1, -1, self.shape.DV))
            if n:
                o[:, self.shape.n - n :] = ops.three_branches(
                    self.q[row, self.shape.n - n :], summaries, *others, gates, num_keys=M,
                    block_indices=ids, block_counts=self.shape.top_n, backend="reference", **SIZES,
                )  # fmt: skip
            rows.append(o)
        return torch.cat(rows)

    def lists(self) -> Tensor:
        """Some distinct blocks for each query, empty slots among them, the same for all dtypes."""
        s, generator = self.shape, torch.Generator().manual_seed(1)
        shape = (len(s.lengths), s.n, s.H, 10)
        ids = torch.rand(shape, generator=generator).argsort(-1)[..., : s.top_n].int()
        return torch.where(torch.rand(ids.shape, generator=generator) < 0.2, -1, ids)

    def cached(self, unwritten: float = float("nan"), ring: int = 16) -> dict[str, object]:
        """The arguments of `decode_attention`: what no token fills is `unwritten`."""
        s, device = self.shape, self.q.device
        page_size = s.page_size or 72
        max_pages = 1 if s.page_size is None else -(-max(s.lengths) // page_size) + 1
        B = len(s.lengths)
        table = torch.randperm(B * max_pages, generator=torch.Generator().manual_seed(2))
        table = table.view(B, max_pages).int().to(device)
        is_paged = s.page_size is not None
        (k_cmp, v_cmp), (k, v), (k_win, v_win) = self.tokens

        def new(x: Tensor, *shape: int) -> Tensor:
            return x.new_full((*shape, *x.shape[2:]), unwritten)

        pages = [new(x, B * max_pages, page_size) for x in (k, v)]
        summaries = [new(x, B * max_pages, page_size // 4) for x in (k_cmp, v_cmp)]
        rings = [new(x, B, ring) for x in (k_win, v_win)]
        for b, M in enumerate(s.lengths):
            position = torch.arange(M, device=device)
            page, place = places(position[None], table[b : b + 1], page_size)
            page, place = (page[0], place[0]) if is_paged else (b, position)
            for target, x in zip(pages, (k, v), strict=True):
                target[page, place] = x[b, :M]
            for target, x in zip(summaries, (k_cmp, v_cmp), strict=True):
                made = ops.compress(x[b : b + 1, :M], length=6, stride=4, backend="reference")[0]
                first = torch.arange(len(made), device=device) * 4
                page = table[b, first // page_size].long() if is_paged else b
                target[page, first % page_size // 4] = made
            for target, x in zip(rings, (k_win, v_win), strict=True):
                last = position[max(0, M - ring) :]
                target[b, last % ring] = x[b, last]
        return {
            "q": self.q, "compressed": summaries, "selected": pages, "window": rings,
            "gates": self.gates, "block_counts": s.top_n, **SIZES,
            "lengths": torch.tensor(s.lengths, dtype=torch.int32, device=device),
            "block_table": table if is_paged else None,
        }  # fmt: skip


def draw(shape: Shape, branches: Sequence[int] = (0, 1, 2), spread: float = 2.0) -> Problem:
    g = torch.Generator().manual_seed(0)
    B, M = len(shape.lengths), max(shape.lengths)

    def new(*size: int) -> Tensor:
        return torch.randn(size, generator=g, dtype=torch.float64)

    q = new(B, shape.n, shape.HQ, shape.D) * spread
    tokens = [(new(B, M, shape.H, shape.D), new(B, M, shape.H, shape.DV)) for _ in range(3)]
    gates = [new(B, shape.n, shape.HQ) if i in branches else None for i in range(3)]
    return Problem(q, tokens, gates, shape)


SHAPES = {
    "one": Shape(),
    "pages": Shape(page_size=16),
    "three": Shape(n=3, page_size=24, lengths=(70, 23, 2)),
    "one head": Shape(HQ=1, H=1, D=80, DV=20, lengths=(9,)),
    "group of 20": Shape(HQ=20, H=1, D=16, DV=16, page_size=8, lengths=(65, 5)),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@pytest.mark.usefixtures("few_parts")
@shapes
@dtypes
@places_of(BACKENDS, slow=("tilelang",))
def test_error_budget(backend: str, device: str, dtype: torch.dtype, shape: Shape) -> None:
    """Twice the error of the operators over whole sequences in the same dtype, plus 1e-6."""
    skip_unless_runs(backend, device, dtype)
    exact = draw(shape).to(device, dtype).to(device, torch.float64)
    ids = exact.lists().to(device)
    expected = exact.whole(ids)
    rounded = exact.to(device, dtype)
    budget = 2 * (rounded.whole(ids).double() - expected).abs().max() + 1e-6
    found = ops.decode_attention(**rounded.cached(), block_indices=ids, backend=backend)
    assert found.dtype == dtype
    assert (found.double() - expected).abs().max() <= budget


@pytest.mark.usefixtures("few_parts")
@pytest.mark.parametrize("branches", [(0,), (0, 1), (0, 2), (2,), (0, 1, 2)], ids=str)
@places_of(BACKENDS, slow=("tilelang",))
def test_the_choice_and_each_branch(backend: str, device: str, branches: tuple[int, ...]) -> None:
    """The blocks are those that whole sequences choose; a branch without a gate is left out."""
    skip_unless_runs(backend, device)
    exact = draw(Shape(n=2, page_size=16, lengths=(70, 41)), branches).to(device, torch.float64)
    problem = exact.to(device, torch.float32)
    found = ops.decode_attention(**problem.cached(), backend=backend)
    torch.testing.assert_close(found.double(), exact.whole(), rtol=1e-4, atol=1e-5)


def test_fp64_is_exact() -> None:
    for shape in SHAPES.values():
        problem = draw(shape)
        found = ops.decode_attention(**problem.cached())
        torch.testing.assert_close(found, problem.whole(), rtol=1e-12, atol=1e-12)


@places_of(BACKENDS)
def test_a_row_that_sees_nothing(backend: str, device: str) -> None:
    """An empty row, and queries before the first token: zeros, whatever the buffers hold."""
    skip_unless_runs(backend, device)
    problem = draw(Shape(n=3, lengths=(0, 2, 9))).to(device, torch.float32)
    found = ops.decode_attention(**problem.cached(), backend=backend)
    assert (found[0] == 0).all()
    assert (found[1, 0] == 0).all()
    torch.testing.assert_close(found, problem.whole(), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("few_parts")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@places_of(BACKENDS, slow=("tilelang",))
def test_what_is_not_finite_spoils_who_sees_it(backend: str, device: str, bad: float) -> None:
    skip_unless_runs(backend, device)
    problem = draw(Shape(lengths=(40, 40))).to(device, torch.float32)
    clean = ops.decode_attention(**problem.cached(), backend=backend)
    problem.tokens[2][1][0, 35, 1] = bad  # a value in the window of row 0, second head
    found = ops.decode_attention(**problem.cached(), backend=backend)
    assert not found[0, 0, 3:].isfinite().any()
    torch.testing.assert_close(found[0, 0, :3], clean[0, 0, :3], rtol=0, atol=0)
    torch.testing.assert_close(found[1], clean[1], rtol=0, atol=0)
    problem.tokens[0][0][1, 38, 0] = bad  # in no complete summary of row 1
    again = ops.decode_attention(**problem.cached(), backend=backend)
    torch.testing.assert_close(again, found, rtol=0, atol=0, equal_nan=True)


@places_of(BACKENDS)
def test_scores_far_apart(backend: str, device: str) -> None:
    """Parts whose largest scores are hundreds of powers of two apart merge to what one pass
    gives."""
    skip_unless_runs(backend, device)
    exact = draw(Shape(n=1, lengths=(70, 66)), spread=200.0).to(device, torch.float64)
    ids = exact.lists().to(device)
    found = ops.decode_attention(
        **exact.to(device, torch.float32).cached(), block_indices=ids, backend=backend
    )
    torch.testing.assert_close(found.double(), exact.whole(ids), rtol=1e-3, atol=1e-3)


def test_there_is_no_gradient() -> None:
    problem = draw(Shape())
    call = problem.cached()
    call["q"].requires_grad_()
    with pytest.raises(RuntimeError, match=r"decode_attention: there is no gradient"):
        ops.decode_attention(**call).sum().backward()


MALFORMED = {
    "q": (lambda c: {"q": c["q"][0]}, "q: got .*expected 4 dimensions"),
    "dtype": (lambda c: {"q": c["q"].float()}, r"selected\[0\]: got .*expected the dtype of q"),
    "heads": (lambda c: {"q": c["q"][:, :, :5], "gates": [None] * 3}, "a multiple"),
    "gates": (lambda c: {"gates": [None] * 3}, "expected at least one gate"),
    "two gates": (lambda c: {"gates": c["gates"][:2]}, "gates: got 2, expected three"),
    "lengths": (lambda c: {"lengths": c["lengths"].long()}, "lengths: got .*expected int32"),
    "rows": (lambda c: {"lengths": c["lengths"][:1]}, "lengths: got .*one for each row of q, 2"),
    "ring": (lambda c: {"window": [x[:, :10].clone() for x in c["window"]]}, "at least 11"),
    "no ring": (lambda c: {"window": ()}, r"window: got \(\), expected rings"),
    "strides": (lambda c: {"window": [x[:, :, :, ::1][:, :15] for x in c["window"]]}, "contiguous"),
    "summaries": (lambda c: {"compressed": c["selected"]}, r"compressed\[0\]: got .*shape"),
    "no summaries": (lambda c: {"compressed": ()}, r"compressed: got \(\)"),
    "table": (lambda c: {"block_table": c["block_table"].long()}, "block_table: got .*int32"),
    "page": (lambda c: {"block_size": 7}, "page_size: got 16, expected a multiple of block_size"),
    "stride": (lambda c: {"stride": 3}, "page_size: got 16, expected a multiple of stride, 3"),
    "counts": (lambda c: {"block_counts": 2}, "block_counts: got 2, expected an int of at least 3"),
    "lists": (lambda c: {"block_indices": torch.zeros(2, 1, 1, 3).int()}, "block_indices: got"),
    "scale": (lambda c: {"scale": float("nan")}, "scale: got nan"),
    "backend": (lambda c: {"backend": "cuda"}, "backend: got"),
}


@pytest.mark.parametrize(("change", "message"), MALFORMED.values(), ids=MALFORMED)
def test_a_wrong_argument_is_named(change: object, message: str) -> None:
    call = draw(Shape(page_size=16)).cached()
    with pytest.raises((ValueError, TypeError), match=message):
        ops.decode_attention(**{**call, **change(call)})


@pytest.mark.gpu
@kernels
@pytest.mark.parametrize("page_size", [None, 16])
def test_a_graph_holds_for_every_length(page_size: int | None, backend: str) -> None:
    """Captured at one length, replayed at others; and nothing waits for the device."""
    skip_unless_runs(backend, "cuda")
    shape = Shape(n=2, page_size=page_size, lengths=(70, 23))
    problem = draw(shape).to("cuda", torch.float32)
    call = {**problem.cached(ring=72), "backend": backend}
    for _ in range(2):
        ops.decode_attention(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = ops.decode_attention(**call)
    for lengths in ((70, 23), (30, 5), (1, 0), (64, 12)):
        now = Problem(problem.q, problem.tokens, problem.gates, replace(shape, lengths=lengths))
        call["lengths"].copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        torch.testing.assert_close(o, now.whole(), rtol=1e-4, atol=1e-5)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.decode_attention(**call)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@kernels
def test_a_cache_past_int32(backend: str) -> None:
    """Pages with more than 2**31 numbers: the last row is as right as the first."""
    skip_unless_runs(backend, "cuda", torch.bfloat16)
    H, D, page_size = 4, 128, 64
    pages = 2**31 // (H * D * page_size) + 64
    k, v = (torch.zeros(pages, page_size, H, D, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    table = torch.tensor([[0, 1], [pages - 2, pages - 1]], device="cuda", dtype=torch.int32)
    for x in (k, v):
        x[:2] = torch.randn(2, page_size, H, D, device="cuda")
        x[-2:] = x[:2]
    q = torch.randn(1, 1, 16, D, device="cuda", dtype=torch.bfloat16).expand(2, -1, -1, -1)
    gates = [None, torch.ones(2, 1, 16, device="cuda", dtype=torch.bfloat16), None]
    o = ops.decode_attention(
        q, (), (k, v), (), gates, torch.tensor([100, 100], device="cuda", dtype=torch.int32),
        block_table=table, block_indices=torch.tensor([0, 1], device="cuda").expand(2, 1, H, 2),
        block_size=64, backend=backend,
    )  # fmt: skip
    assert o.isfinite().all()
    assert (o[0] != 0).any()
    torch.testing.assert_close(o[0], o[1], rtol=0, atol=0)


@pytest.mark.gpu
@kernels
def test_the_same_bits_in_every_run(backend: str) -> None:
    skip_unless_runs(backend, "cuda", torch.bfloat16)
    call = draw(Shape(n=3, page_size=16, lengths=(70, 23))).to("cuda", torch.bfloat16).cached()
    first = ops.decode_attention(**call, backend=backend)
    for _ in range(5):
        again = ops.decode_attention(**call, backend=backend)
        torch.testing.assert_close(again, first, rtol=0, atol=0)
