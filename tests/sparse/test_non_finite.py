"""NaN and infinity: one rule on every backend. What a row sees spoils it as IEEE arithmetic has it;
what is hidden does nothing.

A visible key, or the query itself, spoils the row's output and log-sum-exp; a visible value spoils
the output's channel, and never the log-sum-exp; a row that sees a key is never taken for one that
sees none.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from branches import Shape
from places import places_of, skip_unless_runs
from places import product as on_places
from selection import Problem
from torch import Tensor

from nsa_tutorial import library, ops

BACKENDS = ["reference", "tilelang", "triton"]
places = places_of(BACKENDS)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter

N, M = 6, 34  # queries at the positions 28 to 33
# what is spoiled: for some rows it is listed, for some hidden, for two the future
KEY, QUERY = 30, 2
NUMBERS = (math.nan, math.inf, -math.inf)
Operator = Callable[[str, torch.dtype, str], tuple[Callable, list[Tensor], Tensor]]


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The textbook's softmax, a row at a time, over what `mask [B, N, H, M]` shows: the rule."""
    (B, N, HQ, D), G = q.shape, q.shape[2] // k.shape[2]
    o, lse = q.new_zeros(B, N, HQ, v.shape[3]), q.new_full((B, N, HQ), -math.inf)
    for b, n, i in product(range(B), range(N), range(HQ)):
        visible = mask[b, n, i // G].nonzero().flatten()
        if len(visible):
            s = (k[b, visible, i // G] * q[b, n, i]).sum(-1) * D**-0.5
            p = torch.exp(s - s.max())  # all NaN where all scores are -inf
            o[b, n, i] = (p[:, None] * v[b, visible, i // G]).sum(0) / p.sum()
            lse[b, n, i] = -math.inf if s.max() == -math.inf else s.max() + p.sum().log()
    return o, lse


def spoil(tensors: list[Tensor], where: str, number: float) -> list[Tensor]:
    """`q`, `k`, `v` with `number` in one channel of one head of one of them."""
    tensors = [x.clone() for x in tensors]
    tensors["qkv".index(where)][0, QUERY if where == "q" else KEY, 0, 1] = number
    return tensors


def selected(
    backend: str, dtype: torch.dtype, device: str
) -> tuple[Callable, list[Tensor], Tensor]:
    call = Problem(N=N, M=M, own=True, S=2).make(dtype, device)

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return call.having(q=q, k=k, v=v).run(backend)

    return run, [call.q, call.k, call.v], call.mask()


def window(backend: str, dtype: torch.dtype, device: str) -> tuple[Callable, list[Tensor], Tensor]:
    shape = Shape(N=N, M=M, window=9)

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return ops.sliding_window_attention(
            q, k, v, window_size=9, return_lse=True, backend=backend
        )

    return (
        run,
        [x.to(device) for x in shape.make(dtype)],
        shape.over_heads(shape.seen_keys(9)).to(device),
    )


def list_beside_window(
    backend: str, dtype: torch.dtype, device: str
) -> tuple[Callable, list[Tensor], Tensor]:
    """The list of `selected_and_window_attention`, which its window must leave alone."""
    call = Problem(N=N, M=M, S=2).make(dtype, device)

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        options = {"block_size": 16, "window_size": 3, "return_lse": True, "backend": backend}
        return ops.selected_and_window_attention(q, k, v, call.ids, **options)[:2]

    return run, [call.q, call.k, call.v], call.mask()


def of_summaries(shape: Shape) -> Operator:
    def make(
        backend: str, dtype: torch.dtype, device: str
    ) -> tuple[Callable, list[Tensor], Tensor]:
        cu_seqlens = None if shape.cu is None else shape.offsets.to(device)
        options = {"length": shape.length, "stride": shape.stride, "cu_seqlens": cu_seqlens}
        options |= {"return_lse": True, "backend": backend}

        def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            return ops.compressed_attention(q, k, v, **options)

        q, k, v = (x.to(device) for x in shape.make(dtype))
        M_c = len(shape.summaries())
        mask = shape.over_heads(shape.seen_summaries()).to(device)
        return run, [q, k[:, :M_c], v[:, :M_c]], mask

    return make


# Several tiles of queries, and steps that the last ones see as a whole; what is spoiled lies in the
# first tile and step. The third query sees two summaries.
SUMMARIES = Shape(N=132, M=132, length=2, stride=1)
# All in one tile: the third query is in one sequence, and summary 30 in the other.
PACKED = replace(SUMMARIES, N=44, M=44, cu=(0, 12, 44))


def in_tiles(
    backend: str, dtype: torch.dtype, device: str
) -> tuple[Callable, list[Tensor], Tensor]:
    """The list as `native_sparse_attention` computes it on the reference: a mask over a tile of
    queries."""
    call = Problem(N=N, M=M, own=True, S=2).make(dtype, device)

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        options = (16, True, True, 24**-0.5, "reference", "tiles")
        return library.selected_attention(q, k, v, call.ids, None, None, None, *options)

    return run, [call.q, call.k, call.v], call.mask()


OPERATORS = {f.__name__: f for f in (selected, window, list_beside_window)} | {
    "summaries": of_summaries(SUMMARIES),
    "packed_summaries": of_summaries(PACKED),
}
CASES = {
    f"{name} {where} {x}": (OPERATORS[name], where, x)
    for name, where, x in product(OPERATORS, "qkv", NUMBERS)
}
# Every operator with every input, by one of the numbers.
QUICK = {
    torch.float32: [
        "selected q nan",
        "selected k inf",
        "selected k -inf",
        "selected v nan",
        "window q inf",
        "window k nan",
        "window v -inf",
        "list_beside_window q -inf",
        "list_beside_window k nan",
        "list_beside_window v inf",
        "summaries k -inf",
        "summaries v inf",
        "packed_summaries q inf",
        "packed_summaries k nan",
        "packed_summaries v -inf",
    ],
    torch.float16: ["selected k inf"],
}


# Every operator with every input once more, by another number on each backend.
REST = {
    backend: [
        f"{name} {where} {list(NUMBERS)[(i + j) % len(NUMBERS)]}"
        for i, (name, where) in enumerate(product(OPERATORS, "qkv"))
    ]
    for j, backend in enumerate(BACKENDS)
}
# several tiles in the interpreter: the packed ones say it of Triton's keys
ONCE = {"triton": CASES.keys() - {"summaries k -inf", "summaries v inf"}}


@on_places("case", CASES, BACKENDS, QUICK, slow=ONCE, rest=REST)
def test_one_rule(
    case: tuple[Operator, str, float], dtype: torch.dtype, backend: str, device: str
) -> None:
    skip_unless_runs(backend, device, dtype)
    assert_rule(*case, backend, dtype, device)


LISTS = {name: case for name, case in CASES.items() if name.startswith("selected")}


@on_places("case", LISTS, ["tiles", "blocks"], {torch.float32: ["selected k inf"]})
def test_one_rule_in_each_order(
    case: tuple[Operator, str, float], dtype: torch.dtype, backend: str, device: str
) -> None:
    """Triton, in the orders that it does not take by itself for few queries."""
    skip_unless_runs(backend, device, dtype)
    assert_rule(*case, backend, dtype, device)


@pytest.mark.parametrize(("where", "number"), list(zip("qkv", NUMBERS, strict=True)))
def test_a_mask_over_tiles_on_the_reference(where: str, number: float) -> None:
    assert_rule(in_tiles, where, number, "reference", torch.float32, "cpu")


def assert_rule(
    operator: Operator, where: str, number: float, backend: str, dtype: torch.dtype, device: str
) -> None:
    run, tensors, mask = operator(backend, dtype, device)
    o_clean, lse_clean = run(*tensors)
    spoiled = spoil(tensors, where, number)
    o, lse = run(*spoiled)
    o_true, lse_true = (
        x.to(device) for x in attention(*(x.double().cpu() for x in spoiled), mask.cpu())
    )
    assert not o_true.isfinite().all(), "nobody sees the number: the case is none"
    tolerance = 1e-5 if dtype == torch.float32 else 16 * torch.finfo(dtype).eps

    finite = o_true.isfinite()
    assert torch.equal(o.isfinite(), finite)
    assert torch.allclose(o.double()[finite], o_true[finite], atol=tolerance)
    same = torch.equal
    if backend == "tiles":  # a tile that shares what it fetches is left to another kernel then
        same = functools.partial(torch.allclose, atol=tolerance)
    if where == "v":
        assert same(lse, lse_clean), "a value reached the log-sum-exp"
    else:
        assert torch.equal(o.isnan(), o_true.isnan())
        assert torch.allclose(lse.double(), lse_true, atol=8 * tolerance, equal_nan=True)
    if where != "q":
        blind = ~mask[:, :, :, KEY].repeat_interleave(o.shape[2] // mask.shape[2], 2)
        # who does not see it gives the same to the bit
        assert same(o[blind], o_clean[blind])
        assert same(lse[blind], lse_clean[blind])


@places
def test_all_visible_scores_minus_infinity(backend: str, device: str) -> None:
    """Not a row that saw nothing: 0/0 in the output, the logarithm of 0 beside it. The row without
    a block stays empty."""
    skip_unless_runs(backend, device)
    call = Problem(N=2, M=2, S=1).make(device=device)
    k = call.k.clone()
    k[..., 3] = -math.inf
    ids = torch.tensor([-1, 0], dtype=torch.int32, device=device)
    ids = ids.view(1, 2, 1, 1).expand(1, 2, 2, 1)
    o, lse = call.having(q=call.q.abs() + 1, k=k, ids=ids).run(backend)
    assert (o[0, 0] == 0).all()
    assert o[0, 1].isnan().all()
    assert (lse == -math.inf).all()


@places
@pytest.mark.parametrize("name", ["selected", "window", "list_beside_window", "packed_summaries"])
def test_all_that_a_row_does_not_see(name: str, backend: str, device: str) -> None:
    """NaN in every key and value that is hidden from a row: in its own block, before its window,
    past the end."""
    skip_unless_runs(backend, device)
    run, (q, k, v), mask = OPERATORS[name](backend, torch.float32, device)
    o, lse = run(q, k, v)
    for row in (QUERY, N - 1):
        hidden = ~mask[0, row].T[None, ..., None]  # [1, M, H, 1]
        o_after, lse_after = run(
            q, k.masked_fill(hidden, math.nan), v.masked_fill(hidden, math.inf)
        )
        assert torch.equal(o[:, row], o_after[:, row])
        assert torch.equal(lse[:, row], lse_after[:, row])


GRADIENTS = [
    "selected q nan",
    "selected k inf",
    "window v nan",
    "list_beside_window k nan",
    "summaries k nan",
    "packed_summaries v -inf",
]


# of each operator's kernels, one language is asked here: the forward, above, asks both
ASKED = {
    "triton": ["selected q nan", "packed_summaries v -inf"],
    "tilelang": ["window v nan", "summaries k nan"],
}


@on_places(
    "case", CASES, BACKENDS, {torch.float32: GRADIENTS}, dtypes=[torch.float32],
    slow=ASKED, rest=REST,
)  # fmt: skip
def test_gradients_of_what_is_not_spoiled(
    case: tuple[Operator, str, float], dtype: torch.dtype, backend: str, device: str
) -> None:
    skip_unless_runs(backend, device)
    assert_gradients(*case, backend, device)


@on_places(
    "case", LISTS, ["tiles", "blocks"], {torch.float32: ["selected v nan"]},
    dtypes=[torch.float32],
)  # fmt: skip
def test_gradients_in_each_order(
    case: tuple[Operator, str, float], dtype: torch.dtype, backend: str, device: str
) -> None:
    skip_unless_runs(backend, device)
    assert_gradients(*case, backend, device)


@pytest.mark.parametrize(("where", "number"), list(zip("qkv", NUMBERS, strict=True)))
def test_gradients_of_a_mask_over_tiles_on_the_reference(where: str, number: float) -> None:
    assert_gradients(in_tiles, where, number, "reference", "cpu")


def assert_gradients(
    operator: Operator, where: str, number: float, backend: str, device: str
) -> None:
    """Rows that do not see it keep their gradients to the bit. So does what only such rows see, but
    for the order of its sums: kernels walk a row that is not finite with a mask."""
    run, tensors, mask = operator(backend, torch.float32, device)

    def gradients(tensors: list[Tensor]) -> list[Tensor]:
        inputs = [x.clone().requires_grad_() for x in tensors]
        o, lse = run(*inputs)
        (o.sum() + lse.masked_fill(lse == -math.inf, 0).sum()).backward()
        return [x.grad[0] for x in inputs]

    clean, (d_q, d_k, d_v) = gradients(tensors), gradients(spoil(tensors, where, number))
    # [N], in head 0
    is_spoiled = mask[0, :, 0, KEY]
    if where == "q":
        is_spoiled = torch.arange(d_q.shape[0], device=device) == QUERY
    seen_by_them = mask[0, is_spoiled, 0].any(0)  # [M]
    near = functools.partial(torch.allclose, atol=2e-6, rtol=1e-5)
    # a tile that shares what it fetches is left to another kernel then
    same = near if backend == "tiles" else torch.equal
    same_queries = near if backend == "blocks" else same  # whose gradients are added by atomics
    assert same_queries(d_q[~is_spoiled], clean[0][~is_spoiled])
    for d, right in ((d_k, clean[1]), (d_v, clean[2])):
        assert near(d[~seen_by_them], right[~seen_by_them])
        assert same(d[:, 1], right[:, 1])
    assert not (d_q.isfinite().all() and d_k.isfinite().all() and d_v.isfinite().all())
