"""The unions of neighbours' lists that tiles of queries walk, against Python's sets."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from places import places_of, skip_unless_runs
from selection import Problem

from nsa_tutorial import ops
from nsa_tutorial.sparse.selected_attention import QueryRows, block_list, query_rows

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, in the interpreter
]
places = places_of(["triton"])
PROBLEMS = {
    "ragged": Problem(N=19, M=70, S=5),
    "packed": Problem(N=20, M=20, BS=8, cu=(0, 9, 9, 14, 20), own=True, S=3),
    "one slot": Problem(N=9, M=9, S=1),
    "not causal": Problem(N=12, M=40, causal=False, S=4),
    "blocks of 12": Problem(N=12, M=60, BS=12, S=4),
}


def lists(problem: Problem, device: str) -> tuple[torch.Tensor, torch.Tensor, QueryRows]:
    call = problem.make(device=device)
    cu_seqlens = call.options["cu_seqlens"]
    sizes = {"causal": problem.causal, "cu_seqlens": cu_seqlens, "device": call.q.device}
    rows = query_rows(problem.B, problem.N, problem.M, **sizes)
    own = {"block_counts": None, "include_own_block": problem.own}
    return call.k, block_list(call.ids, rows, block_size=problem.BS, **own), rows


def right(
    ids: torch.Tensor, rows: QueryRows, tile: int, head: int, T: int, BS: int
) -> dict[int, tuple[int, bool]]:
    """By a block's first key: who lists it, and whether they all see all of it."""
    found: dict[int, tuple[int, bool]] = {}
    for t in range(T):
        row = tile * T + t
        if row >= len(ids):
            break
        first, n = int(rows.first_key[row]), int(rows.num_visible[row])
        for block in ids[row, head].tolist():
            if block >= 0 and block * BS < n:
                who, is_whole = found.get(first + block * BS, (0, True))
                found[first + block * BS] = (who | 1 << t, is_whole and (block + 1) * BS <= n)
    return found


@places
@pytest.mark.parametrize(
    ("problem", "T"), [*zip(PROBLEMS.values(), (4, 16, 1, 16, 4), strict=True)], ids=PROBLEMS
)
def test_a_union_is_what_sets_give(problem: Problem, T: int, backend: str, device: str) -> None:
    skip_unless_runs(backend, device)
    from nsa_tutorial.kernels.triton.unions import unions

    k, ids, rows = lists(problem, device)
    BT = problem.BS if problem.BS == 16 else 16
    made = unions(k, k, ids, rows, block_size=problem.BS, T=T, BT=BT)
    for tile in range(len(made.count)):
        for head in range(problem.H):
            count = int(made.count[tile, head])
            num_whole = int(made.num_whole[tile, head])
            starts = made.start[tile, head, :count].tolist()
            who = made.listed_by[tile, head, :count].tolist()
            expected = right(ids, rows, tile, head, T, problem.BS)
            assert dict(zip(starts, who, strict=True)) == {s: x for s, (x, _) in expected.items()}
            whole = {s for s, (_, is_whole) in expected.items() if is_whole}
            assert set(starts[:num_whole]) == (whole if problem.BS % BT == 0 else set())


@places
def test_what_is_left_to_one_query_in_a_program(backend: str, device: str) -> None:
    """A union that shares too little, a block listed twice, a number that is not finite or so large
    that a score may be infinite."""
    skip_unless_runs(backend, device)
    from nsa_tutorial.kernels.triton.unions import unions

    ids = torch.tensor([[0, 1], [0, 1], [0, 1], [2, 3], [1, 1], [0, 2]], dtype=torch.int32)
    ids = ids[:, None].to(device)  # [R, H = 1, S = 2]: in tiles of 2
    rows = query_rows(1, 6, 64, causal=False, cu_seqlens=None, device=torch.device(device))
    k = torch.zeros(1, 64, 1, 16, device=device)

    def counts(**options: float) -> list[int]:
        sizes = {"block_size": 16, "T": 2, "BT": 16}
        return unions(k, k, ids, rows, **sizes, **options).count.flatten().tolist()

    assert counts() == [2, 4, -1]
    assert counts(most=0.5) == [2, -1, -1]
    for bad in (torch.nan, -torch.inf, 2.0**64):
        k[0, 63, 0, 3] = bad
        assert counts() == [-1, -1, -1]


@places
@pytest.mark.parametrize("size", [2.0**63, 2.0**127], ids=["in a tile", "too large for one"])
def test_what_a_neighbour_lists_is_nobody_else_s(backend: str, device: str, size: float) -> None:
    """A tile of queries has one mask for a row: a block of the largest numbers adds nothing to the
    outputs and gradients of those who do not list it."""
    skip_unless_runs(backend, device)
    ids = torch.tensor([[0], [1], [0], [0]], dtype=torch.int32)[None, :, None].to(device)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, h, 16, generator=generator) for n, h in ((4, 2), (32, 1), (32, 1)))
    k[:, 16:], v[:, 16:] = size, -size
    tensors = [x.to(device).requires_grad_() for x in (q, k, v)]

    def run(**where: str) -> list[torch.Tensor]:
        options = {"block_size": 16, "causal": False, "include_own_block": False}
        o = ops.selected_attention(*tensors, ids, **options, **where)
        return [
            x[:, [0, 2, 3]] for x in (o, torch.autograd.grad(o[:, [0, 2, 3]].sum(), tensors)[0])
        ]

    found, right = run(backend=backend, order="tiles"), run(backend="reference")
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


# -- lists too long for a program --


def test_a_program_has_at_most_32_warps() -> None:
    """Whatever the group, the slots and the widths: longer lists are not united."""
    from nsa_tutorial.kernels.triton.launch_options import query_tile_options
    from nsa_tutorial.kernels.triton.selected.by_query_tiles import has_room
    from nsa_tutorial.kernels.triton.unions import num_warps

    fitting = set()
    for G, D, dtype in product((1, 5, 8, 9, 16, 17, 64), (64, 256), (torch.float16, torch.float32)):
        q, v = (torch.empty(1, 1, n, D, dtype=dtype) for n in (G, 1))
        T = query_tile_options(G, D, D, 64, itemsize=q.element_size())["T"]
        for S in (1, 16, 256, 257, 512, 513, 1024, 1025, 4096, 4097):
            if has_room(q, v, torch.empty(1, 1, S, device="meta"), 64):
                assert num_warps(T, S) <= 32
                fitting.add((G, D, S, q.element_size()))
    assert {(8, 64, 512, 2), (16, 64, 1024, 2), (1, 64, 256, 4)} <= fitting
    assert not fitting & {(5, 64, 513, 2), (8, 64, 513, 2), (9, 64, 1025, 2), (1, 64, 257, 4)}


@places
def test_long_lists_have_one_query_in_a_program(
    backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen lists of 257 slots, tiles asked for: forward and backward without a union."""
    skip_unless_runs(backend, device)
    from nsa_tutorial.kernels.triton.selected import by_query_tiles

    monkeypatch.setattr(by_query_tiles, "unions", None)
    call = Problem(N=1, M=40, H=1, G=1, S=257).make(device=device)
    tensors = [x.requires_grad_() for x in (call.q, call.k, call.v)]

    def run(**where: str) -> list[torch.Tensor]:
        o = ops.selected_attention(*tensors, call.ids, **call.options, **where)
        return [o, *torch.autograd.grad(o.square().sum(), tensors)]

    found, right = run(backend=backend, order="tiles"), run(backend="reference")
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(("G", "S"), [(1, 257), (5, 513), (8, 513), (9, 1025), (16, 1025)])
def test_long_lists_on_a_gpu(G: int, S: int) -> None:
    """Enough queries for another order, in 16 bits: every order gives what one query in a program
    does."""
    call = Problem(N=2048, M=2048, H=1, G=G, D=64, DV=64, BS=16, S=S).make(torch.bfloat16, "cuda")
    tensors = [x.requires_grad_() for x in (call.q, call.k, call.v)]

    def run(order: str) -> list[torch.Tensor]:
        options = {**call.options, "backend": "triton", "order": order}
        o = ops.selected_attention(*tensors, call.ids, **options)
        return [o, *torch.autograd.grad(o.square().sum(), tensors)]

    right = run("queries")
    for order in ("auto", "tiles"):
        for a, b in zip(run(order), right, strict=True):
            assert (a - b).float().norm() <= 0.01 * b.float().norm()
