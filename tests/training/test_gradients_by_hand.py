"""The passes of `training.gradients` against autograd of a dense formula in fp64, and against
finite differences: what the kernels are held against later."""

from __future__ import annotations

import pytest
import torch
from places import skip_unless_runs
from selection import Problem
from torch import Tensor

from nsa_tutorial.sparse import sliding_window
from nsa_tutorial.sparse.selected_attention import QueryRows, block_list, forward, query_rows
from nsa_tutorial.training import gradients, tile_gradients
from nsa_tutorial.training.tile_gradients import preprocess

# -- one KV head, dense and by tiles --


def one_head(N: int, M: int, G: int, *, D: int = 5, DV: int = 3, seed: int = 0) -> list[Tensor]:
    """`q [N * G, D]`, `k`, `v`, and the position of each row, the queries being the last `N`."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, d, generator=g).double() for n, d in ((N * G, D), (M, D), (M, DV)))
    return [q, k, v, torch.arange(M - N, M).repeat_interleave(G)]


def attend(q: Tensor, k: Tensor, v: Tensor, position: Tensor, scale: float) -> tuple[Tensor, ...]:
    s = scale * q @ k.T
    s = s.masked_fill(torch.arange(len(k)) > position[:, None], -torch.inf)
    return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)


TILES = {"whole": (99, 99), "ragged": (4, 3), "wide": (2, 7), "single rows and keys": (1, 1)}


@pytest.mark.parametrize(("tile_q", "tile_k"), TILES.values(), ids=TILES)
@pytest.mark.parametrize(("N", "M", "G"), [(8, 8, 1), (5, 11, 3), (1, 9, 2)])
def test_by_hand_and_by_autograd(N: int, M: int, G: int, tile_q: int, tile_k: int) -> None:
    """Dense and by tiles, through `o` and `lse`; a group's heads are rows."""
    *inputs, position = one_head(N, M, G)
    q, k, v = inputs = [x.requires_grad_() for x in inputs]
    scale = 0.7
    o, lse = attend(q, k, v, position, scale)
    d_o, d_lse = torch.randn_like(o), torch.randn_like(lse)
    right = torch.autograd.grad((o, lse), inputs, (d_o, d_lse))
    with torch.no_grad():
        row_lse, delta = preprocess(d_o, d_lse, o, lse)
        arguments = (d_o, q, k, v, row_lse, delta, position)
        tiles = {"scale": scale, "tile_q": tile_q, "tile_k": tile_k}
        dense = gradients.dense(*arguments, scale=scale)
        in_two = (
            gradients.by_query_tiles(*arguments, **tiles),
            *gradients.by_key_tiles(*arguments, **tiles),
        )
    for found in (dense, in_two):
        for a, b in zip(found, right, strict=True):
            torch.testing.assert_close(a, b)


def test_future_tiles_are_not_read() -> None:
    """NaN in keys that a walk has to skip, and in rows that see nothing of a tile of keys."""
    q, k, v, position = one_head(6, 6, 1)
    o, lse = attend(q, k, v, position, 1.0)
    d_o = torch.ones_like(o)
    lse, delta = preprocess(d_o, torch.zeros_like(lse), o, lse)
    tiles = {"scale": 1.0, "tile_q": 2, "tile_k": 2}
    clean = gradients.by_query_tiles(d_o, q, k, v, lse, delta, position, **tiles)
    k_late, v_late, q_early = k.clone(), v.clone(), q.clone()
    k_late[4:] = v_late[4:] = torch.nan
    found = gradients.by_query_tiles(d_o, q, k_late, v_late, lse, delta, position, **tiles)
    assert torch.equal(found[:4], clean[:4])
    q_early[:4] = torch.nan
    for a, b in zip(
        gradients.by_key_tiles(d_o, q_early, k, v, lse, delta, position, **tiles),
        gradients.by_key_tiles(d_o, q, k, v, lse, delta, position, **tiles),
        strict=True,
    ):
        assert torch.equal(a[4:], b[4:])
        assert a[:4].isnan().any()


# -- lists --


def located(problem: Problem) -> tuple[list[Tensor], Tensor, QueryRows]:
    """`q`, `k`, `v` in fp64, the lists in the form that backends walk, and the rows."""
    call = problem.make(torch.float64)
    o = call.options
    rows = query_rows(
        problem.B,
        problem.N,
        problem.M,
        causal=o["causal"],
        cu_seqlens=o["cu_seqlens"],
        device=call.q.device,
    )
    ids = block_list(
        call.ids,
        rows,
        block_size=problem.BS,
        block_counts=o["block_counts"],
        include_own_block=o["include_own_block"],
    )
    return [call.q, call.k, call.v], ids, rows


def factor_of_keys(slot_scale: Tensor, ids: Tensor, rows: QueryRows, M: int, BS: int) -> Tensor:
    """What multiplies the score of each key, `[R, H, M]`, 0 where it is hidden: a literal loop."""
    R, H, S = ids.shape
    columns = []
    for r in range(R):
        first, visible = int(rows.first_key[r]) % M, int(rows.num_visible[r])
        for h in range(H):
            column = [slot_scale.new_zeros(())] * M
            for s in range(S):
                for offset in range(int(ids[r, h, s]) * BS, int(ids[r, h, s] + 1) * BS):
                    if 0 <= offset < visible:
                        column[first + offset] = slot_scale[r, h, s]
            columns.append(torch.stack(column))
    return torch.stack(columns).view(R, H, M)


def literally(
    q: Tensor, k: Tensor, v: Tensor, slot_scale: Tensor, ids: Tensor, rows: QueryRows, *,
    block_size: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Selected attention as a dense formula, which knows nothing of tiles: `o` and `lse`."""
    (B, N), (M, H), G = q.shape[:2], k.shape[1:3], q.shape[2] // k.shape[2]
    factors = factor_of_keys(slot_scale, ids, rows, M, block_size).view(B, N, H, M)
    ones = torch.ones_like(slot_scale)
    is_seen = factor_of_keys(ones, ids, rows, M, block_size).view(B, N, H, M) > 0
    k, v = (x.repeat_interleave(G, 2) for x in (k, v))
    factors, is_seen = (x.repeat_interleave(G, 2) for x in (factors, is_seen))
    s = scale * torch.einsum("bnhd,bmhd->bnhm", q, k) * factors
    s = s.masked_fill(~is_seen, -torch.inf)
    p = torch.softmax(s, -1).masked_fill(~is_seen, 0)
    return torch.einsum("bnhm,bmhd->bnhd", p, v), torch.logsumexp(s, -1)


PROBLEMS = {
    "two KV heads, ragged tail": Problem(N=12, M=37, D=6, DV=4, BS=5),
    "own block, counts, a batch": Problem(B=2, N=9, M=9, D=4, DV=5, BS=4, own=True, counts=2),
    "packed, an empty sequence": Problem(N=23, M=23, D=4, DV=4, BS=6, cu=(0, 7, 7, 23)),
    "not causal": Problem(N=6, M=17, D=4, DV=4, BS=5, causal=False),
    "one head, one slot": Problem(N=9, M=9, H=1, G=1, S=1, D=4, DV=4, BS=3),
    "nothing listed": Problem(N=5, M=9, D=4, DV=4, BS=3, counts=0),
}
problems = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)


@problems
def test_lists_by_hand_and_by_autograd(problem: Problem) -> None:
    """Both passes, and the factors' gradient, against a formula that knows of no list."""
    (q, k, v), ids, rows = located(problem)
    g = torch.Generator().manual_seed(1)
    factors = 0.5 + torch.rand(ids.shape, generator=g).double()
    inputs = [x.requires_grad_() for x in (q, k, v, factors)]
    options = {"block_size": problem.BS, "scale": 0.4}
    o, lse = literally(*inputs, ids, rows, **options)
    d_o, d_lse = (torch.randn(x.shape, generator=g).double() for x in (o, lse))
    d_lse = d_lse.masked_fill(lse == -torch.inf, 0)  # a row that sees nothing has no lse
    seen = lse.masked_fill(lse == -torch.inf, 0)
    right = torch.autograd.grad(
        (o, seen), inputs, (d_o, d_lse), allow_unused=True, materialize_grads=True
    )
    with torch.no_grad():
        found = gradients.selected_backward(
            d_o, d_lse, q, k, v, o, lse, ids, rows, **options, slot_scale=factors
        )
    for name, a, b in zip(("q", "k", "v", "slot_scale"), found, right, strict=True):
        torch.testing.assert_close(a, b, msg=lambda told, name=name: f"gradient of {name}: {told}")


@problems
def test_without_factors_they_are_ones(problem: Problem) -> None:
    """At ones, the factors' gradient is `sum(d_s * s)`, and the others do not change."""
    (q, k, v), ids, rows = located(problem)
    o, lse = forward(q, k, v, ids, rows, block_size=problem.BS, scale=0.4)
    saved = (torch.ones_like(o), torch.zeros_like(lse), q, k, v, o, lse, ids, rows)
    options = {"block_size": problem.BS, "scale": 0.4}
    plain = gradients.selected_backward(*saved, **options)
    ones = torch.ones_like(ids, dtype=q.dtype)
    with_ones = gradients.selected_backward(*saved, **options, slot_scale=ones)
    assert plain[3] is None
    assert all(torch.equal(a, b) for a, b in zip(plain[:3], with_ones[:3], strict=True))
    # Euler's rule: q enters the scores alone, so sum(q * d_q) is sum(d_s * s) over a group's keys
    H = k.shape[2]
    by_query = (q * plain[0]).sum(-1).reshape(-1, H, q.shape[2] // H).sum(-1)
    torch.testing.assert_close(with_ones[3].sum(-1), by_query)


class Attend(torch.autograd.Function):
    """Selected attention whose backward is `gradients.selected_backward`."""

    @staticmethod
    def forward(ctx, q, k, v, slot_scale, ids, rows, options):
        o, lse = literally(q, k, v, slot_scale, ids, rows, **options)
        ctx.save_for_backward(q, k, v, slot_scale, o, lse, ids)
        ctx.rows, ctx.options = rows, options
        return o, lse

    @staticmethod
    def backward(ctx, d_o, d_lse):
        q, k, v, slot_scale, o, lse, ids = ctx.saved_tensors
        arguments = (d_o, d_lse, q, k, v, o, lse, ids, ctx.rows)
        found = gradients.selected_backward(*arguments, **ctx.options, slot_scale=slot_scale)
        return *found, None, None, None


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "not causal"])
def test_finite_differences(causal: bool) -> None:
    """In fp64, through `o`, `lse` and the factors."""
    problem = Problem(N=4, M=9, H=2, G=2, D=3, DV=2, BS=4, S=3, causal=causal, own=causal)
    tensors, ids, rows = located(problem)
    factors = torch.linspace(0.5, 1.5, ids.numel()).double().view(ids.shape)
    inputs = [x.requires_grad_() for x in (*tensors, factors)]
    options = {"block_size": problem.BS, "scale": 0.5}

    def outputs(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = Attend.apply(*inputs, ids, rows, options)
        return o, lse.masked_fill(lse == -torch.inf, 0)

    assert torch.autograd.gradcheck(outputs, inputs, fast_mode=True)


def test_a_factor_of_an_empty_slot_is_never_used() -> None:
    """NaN there stays there, and its gradient is 0."""
    problem = PROBLEMS["two KV heads, ragged tail"]
    (q, k, v), ids, rows = located(problem)
    o, lse = forward(q, k, v, ids, rows, block_size=problem.BS, scale=0.4)
    saved = (torch.ones_like(o), torch.zeros_like(lse), q, k, v, o, lse, ids, rows)
    options = {"block_size": problem.BS, "scale": 0.4}
    is_empty = (ids < 0) | (ids * problem.BS >= rows.num_visible[:, None, None])
    assert is_empty.any()
    ones = torch.ones_like(ids, dtype=q.dtype)
    clean = gradients.selected_backward(*saved, **options, slot_scale=ones)
    with_nan = ones.masked_fill(is_empty, torch.nan)
    found = gradients.selected_backward(*saved, **options, slot_scale=with_nan)
    assert all(torch.equal(a, b) for a, b in zip(found, clean, strict=True))
    assert (found[3][is_empty] == 0).all()


def test_both_branches_at_once() -> None:
    """The sum of the two backward passes, each with its own output."""
    problem = PROBLEMS["two KV heads, ragged tail"]
    (q, k, v), ids, rows = located(problem)
    sizes = {"block_size": problem.BS, "scale": 0.4}
    by_list = forward(q, k, v, ids, rows, **sizes)
    by_window = sliding_window.forward(q, k, v, rows, window_size=6, scale=0.4)
    o, lse = (torch.stack(pair) for pair in zip(by_list, by_window, strict=True))
    g = torch.Generator().manual_seed(2)
    d_o, d_lse = (torch.randn(x.shape, generator=g).double() for x in (o, lse))
    found = gradients.selected_and_window_backward(
        d_o, d_lse, q, k, v, o, lse, ids, rows, **sizes, window_size=6
    )
    lists = gradients.selected_backward(d_o[0], d_lse[0], q, k, v, o[0], lse[0], ids, rows, **sizes)
    windows = tile_gradients.window_backward(
        d_o[1], d_lse[1], q, k, v, o[1], lse[1], rows, window_size=6, scale=0.4
    )
    assert found[3] is None
    for a, b, c in zip(found[:3], lists[:3], windows, strict=True):
        assert torch.equal(a, b + c)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """The same numbers, whatever the device."""
    skip_unless_runs("reference", "cuda")
    problem = PROBLEMS["own block, counts, a batch"]
    (q, k, v), ids, rows = located(problem)
    o, lse = forward(q, k, v, ids, rows, block_size=problem.BS, scale=0.4)
    saved = (torch.ones_like(o), torch.zeros_like(lse), q, k, v, o, lse, ids)
    options = {"block_size": problem.BS, "scale": 0.4}
    right = gradients.selected_backward(*saved, rows, **options)[:3]
    there = QueryRows(*(x.cuda() for x in rows[:3]), *rows[3:])
    found = gradients.selected_backward(*(x.cuda() for x in saved), there, **options)[:3]
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a.cpu(), b)
