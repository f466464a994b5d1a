"""The backward in Triton beyond the operators' contract: its variants, its chunks, its order of
sums."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
from selection import Call, Problem
from torch import Tensor

from nsa_tutorial.bench.variants import triton_backward_variants
from nsa_tutorial.kernels.tables import chunks as backward_tables
from nsa_tutorial.kernels.triton import launch_options
from nsa_tutorial.kernels.triton.launch_options import SHARED_MEMORY, dkv_options, tile_sizes
from nsa_tutorial.kernels.triton.selected import backward_ahead
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


@pytest.fixture
def named_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that names rows ahead, for small problems, and on a CPU, too."""
    monkeypatch.setattr(backward_ahead, "OPTIONS", backward_ahead.OPTIONS | {"BT": 16, "BR": 16})
    monkeypatch.setattr(backward_ahead, "LEAST_GROUP", 1)
    monkeypatch.setattr(backward_ahead, "can_walk", lambda *_: True)
    monkeypatch.setattr(backward_ahead, "dkv_kernel", Counted(backward_ahead.dkv_kernel))


class Counted:
    """A kernel that counts its launches."""

    def __init__(self, kernel: triton.JITFunction) -> None:
        self.kernel, self.launches = kernel, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        self.launches += 1
        return self.kernel[grid]


@pytest.mark.parametrize(
    "problem",
    [
        Problem(N=7, M=37, D=16, DV=32, G=2, BS=16, counts="random"),
        Problem(N=19, M=19, D=32, DV=16, G=1, S=2, cu=(0, 3, 3, 17, 19), own=True),
        Problem(N=5, M=37, D=16, DV=16, causal=False, BS=32),
        Problem(B=2, N=5, M=40, D=16, DV=16, H=1, BS=128, S=2),
    ],
    ids=["counts", "packed", "not causal", "one long block"],
)
def test_rows_that_are_named_ahead(problem: Problem, short_chunks: None, named_ahead: None) -> None:
    assert_right(triton_backward_launch.selected_backward, problem)
    assert backward_ahead.dkv_kernel.launches == 1


def test_rows_ahead_that_are_not_to_be_read(short_chunks: None, named_ahead: None) -> None:
    """Queries that no loss asks for may be anything; one that is not finite spoils what it sees."""
    problem = Problem(N=23, M=48, D=16, DV=16, G=2, S=2)
    (d_o, d_lse, q, *rest), sizes = saved(problem)
    d_o, d_lse, q = d_o.clone(), d_lse.clone(), q.clone()
    d_o[:, 5], d_lse[:, 5], q[:, 5] = 0, 0, float("inf")
    run = triton_backward_launch.selected_backward
    found = run(d_o, d_lse, q, *rest, **sizes)[1:3]
    q[:, 5] = 0
    right = gradients.selected_backward(d_o, d_lse, q, *rest, **sizes)[1:3]
    torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-4)
    d_o[0, 9, 0, 0] = float("nan")
    found, right = (
        f(d_o, d_lse, q, *rest, **sizes)[1:3] for f in (run, gradients.selected_backward)
    )
    torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-4, equal_nan=True)
    assert 0 < right[0].isnan().sum() < right[0].numel()


def test_with_too_little_shared_memory_rows_are_named_as_ever(
    monkeypatch: pytest.MonkeyPatch, named_ahead: None
) -> None:
    """A GPU that cannot launch the kernel gets the one that is taught, whose tiles shrink."""
    problem = Problem(N=7, M=37, D=16, DV=16)
    monkeypatch.setattr(ListsCall, "memory", {"itemsize": 4, "shared_memory": 4096})
    assert_right(triton_backward_launch.selected_backward, problem)
    assert backward_ahead.dkv_kernel.launches == 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "BS", "G", "D"),
    [
        (torch.bfloat16, 64, 16, 128), (torch.float16, 128, 16, 64), (torch.bfloat16, 192, 32, 128),
        (torch.float16, 64, 64, 128),
    ],
)  # fmt: skip
def test_on_hopper_rows_are_named_ahead(
    dtype: torch.dtype, BS: int, G: int, D: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As close to the reference as the kernel that is taught, and the same bits in every run."""
    problem = Problem(N=300, M=700, H=2, G=G, D=D, DV=D, BS=BS, S=5, own=True, counts="random")
    arguments, sizes = saved(problem)
    right = gradients.selected_backward(*arguments, **sizes)[1:3]
    *tensors, rows = arguments
    there = [x.cuda().to(dtype if x.is_floating_point() else x.dtype) for x in tensors]
    there[1], there[6] = there[1].float(), there[6].float()  # gradients of lse, and lse
    rows = rows._replace(**{
        name: x.cuda() for name, x in rows._asdict().items() if isinstance(x, Tensor)
    })  # fmt: skip
    run = triton_backward_launch.selected_backward
    kernel = Counted(backward_ahead.dkv_kernel)
    monkeypatch.setattr(backward_ahead, "dkv_kernel", kernel)
    ahead, again = (run(*there, rows, **sizes)[1:3] for _ in range(2))
    assert kernel.launches == 2
    monkeypatch.setattr(triton_backward_launch, "can_name_ahead", lambda *_: False)
    plain = run(*there, rows, **sizes)[1:3]
    for x, same, taught, best in zip(ahead, again, plain, right, strict=True):
        assert torch.equal(x, same)
        error, budget = ((y.cpu().float() - best).norm() for y in (x, taught))
        assert error <= 1.1 * budget + 1e-6, (error, budget)


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
