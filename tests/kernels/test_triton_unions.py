"""The unions of neighbours' lists that tiles of queries walk, against Python's sets."""

from __future__ import annotations

import pytest
import torch
from places import places_of, skip_unless_runs
from selection import Problem

from nsa_tutorial.sparse.selected_attention import QueryRows, block_list, query_rows

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, in the interpreter
]
places = places_of(["triton"])
PROBLEMS = {
    "ragged": Problem(N=19, M=70, S=5),
    "packed": Problem(N=30, M=30, cu=(0, 9, 9, 14, 30), own=True, S=3),
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
@pytest.mark.parametrize("T", [1, 4, 16])
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_a_union_is_what_sets_give(problem: Problem, T: int, backend: str, device: str) -> None:
    skip_unless_runs(backend, device)
    from nsa_tutorial.kernels.triton_unions import unions

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
    """A union that shares too little, a block listed twice, a number that is not finite."""
    skip_unless_runs(backend, device)
    from nsa_tutorial.kernels.triton_unions import unions

    ids = torch.tensor([[0, 1], [0, 1], [0, 1], [2, 3], [1, 1], [0, 2]], dtype=torch.int32)
    ids = ids[:, None].to(device)  # [R, H = 1, S = 2]: in tiles of 2
    rows = query_rows(1, 6, 64, causal=False, cu_seqlens=None, device=torch.device(device))
    k = torch.zeros(1, 64, 1, 16, device=device)

    def counts(**options: float) -> list[int]:
        sizes = {"block_size": 16, "T": 2, "BT": 16}
        return unions(k, k, ids, rows, **sizes, **options).count.flatten().tolist()

    assert counts() == [2, 4, -1]
    assert counts(most=0.5) == [2, -1, -1]
    k[0, 63, 0, 3] = torch.nan
    assert counts() == [-1, -1, -1]
