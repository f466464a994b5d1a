"""The backward in Triton beyond the operators' contract: its variants, its chunks, its order of
sums."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from selection import Call, Problem
from torch import Tensor

from nsa_tutorial.bench.variants import triton_backward_variants
from nsa_tutorial.kernels.tables import chunks as backward_tables
from nsa_tutorial.kernels.triton import launch_options
from nsa_tutorial.kernels.triton.launch_options import SHARED_MEMORY, dkv_options, tile_sizes
from nsa_tutorial.kernels.triton.selected import backward_launch as triton_backward_launch
from nsa_tutorial.kernels.triton.selected.lists_backward import ListsCall
from nsa_tutorial.sparse import inverse_list
from nsa_tutorial.sparse.selected_attention import QueryRows, block_list, query_rows
from nsa_tutorial.training import gradients

PROBLEM = Problem(N=7, M=37, D=16, DV=24, G=2, counts="random")
Lists = tuple[Tensor, QueryRows]


def lists_of(problem: Problem, call: Call) -> Lists:
    rows = query_rows(
        problem.B, problem.N, problem.M, causal=problem.causal,
        cu_seqlens=call.options["cu_seqlens"], device=call.q.device,
    )  # fmt: skip
    options = {"block_counts": call.options["block_counts"], "include_own_block": problem.own}
    return block_list(call.ids, rows, block_size=problem.BS, **options), rows


def saved(problem: Problem) -> tuple[tuple[Tensor, ...], dict[str, float]]:
    """The arguments of a backward, `d_o` to `rows`, and its sizes."""
    call = problem.make()
    o, lse = call.run("reference")
    g = torch.Generator().manual_seed(1)
    d_o, d_lse = (torch.randn(x.shape, generator=g) for x in (o, lse))
    sizes = {"block_size": problem.BS, "scale": problem.D**-0.5}
    return (d_o, d_lse, call.q, call.k, call.v, o, lse, *lists_of(problem, call)), sizes


def assert_right(run: Callable[..., tuple[Tensor, ...]], problem: Problem = PROBLEM) -> None:
    arguments, sizes = saved(problem)
    right = gradients.selected_backward(*arguments, **sizes)
    for found, expected in zip(run(*arguments, **sizes)[:3], right, strict=False):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the blocks of a small problem are cut."""
    monkeypatch.setattr(backward_tables, "CHUNK_ROWS", {2: 6, 4: 6})


@pytest.mark.parametrize("change", triton_backward_variants.CHANGES)
def test_variants_give_the_same(change: str) -> None:
    launch = triton_backward_variants.variant(change)
    if not change.startswith("no chunks"):
        launch.lists_backward.chunks.CHUNK_ROWS = {2: 6, 4: 6}
    assert_right(launch.selected_backward)


def test_a_program_for_each_slot() -> None:
    def run(*arguments: Tensor, block_size: int, scale: float) -> tuple[Tensor, ...]:
        *saved, ids, rows = arguments
        call = ListsCall.of(*saved, rows, ids=ids, block_size=block_size, scale=scale)
        return triton_backward_variants.per_slot(call)

    assert_right(run)


def test_a_line_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    change = {triton_backward_variants.KERNELS: [("no such line", "")]}
    monkeypatch.setitem(triton_backward_variants.CHANGES, "nothing", change)
    with pytest.raises(ValueError, match="found 0 times"):
        triton_backward_variants.variant("nothing")


@pytest.mark.parametrize(
    "problem",
    [
        PROBLEM,
        Problem(N=19, M=19, G=1, S=2, cu=(0, 3, 3, 17, 19), own=True),
        Problem(N=5, M=37, causal=False, BS=5),
        Problem(B=2, N=5, M=40, H=1, BS=128, S=2),
    ],
    ids=["counts", "packed", "not causal", "one long block"],
)
def test_blocks_in_chunks(problem: Problem, short_chunks: None) -> None:
    assert_right(triton_backward_launch.selected_backward, problem)


def test_rows_behind_the_edge(monkeypatch: pytest.MonkeyPatch, short_chunks: None) -> None:
    """More rows see a block in part than the kernel looks at: all of them are masked."""
    monkeypatch.setattr(launch_options, "MOST_EDGE", 2)
    problem = Problem(N=20, M=40, H=1, BS=16, S=2, own=True)
    assert_right(triton_backward_launch.selected_backward, problem)


@pytest.mark.parametrize("run", [None, 4])
@pytest.mark.parametrize("N", [1, 20])
def test_the_inverse_of_the_lists(N: int, run: int | None) -> None:
    """Every visible entry is walked once, by a chunk of its block and head; chunks of a block are
    of similar length and have places of their own. With runs of rows, a head's chunks come
    together, the first run's first."""
    for problem in (
        Problem(N=N, M=37),
        Problem(B=2, N=N, M=37, BS=5),
        Problem(N=35, M=35, cu=(0, 7, 7, 18, 35), own=True),
    ):
        ids, rows = lists_of(problem, problem.make())
        (R, H, S), BS, length = ids.shape, problem.BS, 3
        sizes = {"block_size": BS, "num_keys": problem.B * problem.M}
        inverse = inverse_list.invert_lists(ids, rows, **sizes, run=run)
        chunks = inverse_list.chunks(inverse, length=length)
        found, places, runs = [], [], []
        for chunk in zip(*(x.tolist() for x in chunks[:7]), strict=True):
            first_key, head, first, last, _, num_parts, place = chunk
            entries = inverse.entries[first:last].tolist()
            groups = [(e // S % R, e // S // R) if run else divmod(e // S, H) for e in entries]
            its_runs = {(h, r // run) for r, h in groups} if run else set()
            assert len(its_runs) <= 1, "rows of two runs in one chunk"
            runs += its_runs
            found += [(r, h, head, first_key) for r, h in groups]
            assert entries == sorted(entries)
            if entries and num_parts > 1:
                places.append(place)
                assert length <= len(entries) < 2 * length
        expected = [
            (r, h, h, int(rows.first_key[r]) + i * BS)
            for r in range(R) for h in range(H) for i in ids[r, h].tolist()
            if 0 <= i < -(-int(rows.num_visible[r]) // BS)
        ]  # fmt: skip
        assert sorted(found) == sorted(expected)
        assert len(set(places)) == len(places) <= chunks.num_places
        assert runs == sorted(runs)


def test_the_inverse_of_the_windows() -> None:
    """The rows that see some of a tile, and no others, in two sequences."""
    rows = query_rows(2, 20, 37, causal=True, cu_seqlens=None, device=torch.device("cpu"))
    w, size, H = 7, 4, 2
    sizes = {"window_size": w, "tile_size": size, "num_keys": 74, "num_heads": H}
    inverse = inverse_list.invert_windows(rows, **sizes)
    seen = [
        set(range(b * 37 + max(0, t - w + 1), b * 37 + t + 1))
        for b in (0, 1)
        for t in range(17, 37)
    ]
    for tile, (first, last) in enumerate(zip(inverse.first, inverse.last, strict=True)):
        keys = set(range(tile // H * size, tile // H * size + size))
        expected = [r for r in range(40) if seen[r] & keys]
        assert [e - tile % H * 40 for e in inverse.entries[first:last].tolist()] == expected


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("D", [16, 128, 192, 256])
@pytest.mark.parametrize("BS", [16, 64, 256])
def test_what_a_program_holds_fits(D: int, BS: int, itemsize: int) -> None:
    options = dkv_options(16, D, D, BS, itemsize)
    width = 2 * tile_sizes(16, D, D)["DT"] * itemsize
    rows = options["BT"] + options["num_stages"] * options["BR"]
    assert rows * width <= SHARED_MEMORY


@pytest.mark.gpu
def test_the_same_bits_every_time() -> None:
    """Also where blocks are cut into chunks: their shares are added in order."""
    problem = Problem(N=5000, M=5000, G=16, D=64, DV=64, BS=64, S=8, own=True)
    call = problem.make(torch.bfloat16, "cuda")
    inputs = [x.requires_grad_() for x in (call.q, call.k, call.v)]
    o, _ = call.run("triton")
    d_o = torch.randn_like(o)
    runs = [torch.autograd.grad(o, inputs, d_o, retain_graph=True) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))
