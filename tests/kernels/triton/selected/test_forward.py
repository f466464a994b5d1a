"""The Triton kernels' own choices: which kernel, which tiles, what is compiled again."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
from places import dtypes, product, skip_unless_runs
from selection import Problem, assert_right, assert_within_budget

from nsa_tutorial import ops
from nsa_tutorial.runtime import environment
from nsa_tutorial.sparse.selected_attention import block_list, query_rows

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(environment.detect().triton is None, reason="triton is not installed"),
]

on = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
SELECTED = "nsa_tutorial.kernels.triton.selected"
POINTERS, DESCRIPTORS = "forward", "forward_tma"
both = pytest.mark.parametrize("module", [DESCRIPTORS, POINTERS], ids=["descriptors", "pointers"])
DESCRIBED = {
    "more keys than queries": Problem(B=2, N=4, M=75, D=16, DV=32, BS=16),
    "partly visible blocks everywhere": Problem(N=9, M=20, D=16, DV=16, BS=16, S=2),
    "block of 128, in steps": Problem(N=3, M=600, D=64, DV=64, BS=128, G=16, H=1, S=3),
    "packed, own block": Problem(
        N=19, M=19, D=16, DV=16, cu=(0, 3, 3, 17, 19), own=True, counts="random"
    ),
    "not causal": Problem(N=7, M=43, D=16, DV=16, causal=False),
}


def launch(module: str, *call: object, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    """`o` and `lse` of the lists, by one of the two kernels."""
    return importlib.import_module(f"{SELECTED}.{module}").launch(*call, **options)


def forward(
    module: str,
    problem: Problem,
    dtype: torch.dtype,
    device: str,
    ids: torch.Tensor | None = None,
    **options: int,
):
    call = problem.make(dtype, device)
    call = call if ids is None else call.having(ids=ids)
    given = call.options
    rows = query_rows(
        problem.B,
        problem.N,
        problem.M,
        causal=given["causal"],
        cu_seqlens=given["cu_seqlens"],
        device=torch.device(device),
    )
    lists = {"block_counts": given["block_counts"], "include_own_block": given["include_own_block"]}
    ids = block_list(call.ids, rows, block_size=problem.BS, **lists)
    sizes = {"block_size": problem.BS, "scale": problem.D**-0.5}
    return call, launch(module, call.q, call.k, call.v, ids, rows, **sizes, **options)


@product("problem", DESCRIBED, ["triton"], {torch.float32: DESCRIBED})
@both
def test_both_kernels(
    module: str, problem: Problem, dtype: torch.dtype, backend: str, device: str
) -> None:
    skip_unless_runs(backend, device, dtype)
    if device == "cuda" and module == DESCRIPTORS and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no tensor memory accelerator")
    call, (o, lse) = forward(module, problem, dtype, device)
    (o_true, lse_true), (o_plain, lse_plain) = call.truth(), call.plain()
    assert_within_budget(o, o_true, o_plain, "o")
    assert_within_budget(lse, lse_true, lse_plain, "lse")


@on
@both
def test_a_repeated_block_counts_twice_in_both(module: str, device: str) -> None:
    """The caller's error, but one with a defined result, also for the block that is visible in
    part."""
    skip_unless_runs("triton", device)
    problem = Problem(N=4, M=20, D=16, DV=16, BS=16, S=2)
    ids = torch.tensor([1, 1], dtype=torch.int32, device=device).expand(1, 4, 2, 2)
    _, (_, twice) = forward(module, problem, torch.float32, device, ids)
    first = replace(problem, S=1)
    _, (_, once) = forward(module, first, torch.float32, device, ids[..., :1])
    assert torch.allclose(twice, once + torch.log(torch.tensor(2.0)), atol=1e-5)


@on
@both
@pytest.mark.parametrize("slots", [(15,), (0, 16), (39,), ()], ids=str)
def test_no_block_is_lost_at_the_end_of_a_list(
    slots: tuple[int, ...], module: str, device: str
) -> None:
    """The walk ends at the last slot that names a block, wherever in 40 it lies, and whatever is
    empty before it."""
    skip_unless_runs("triton", device)
    problem = Problem(N=1, M=40, H=1, D=16, DV=16, BS=16, S=40)
    ids = torch.full((1, 1, 1, 40), -1, dtype=torch.int32, device=device)
    for block_id, slot in enumerate(slots):
        ids[..., slot] = block_id
    call, (o, lse) = forward(module, problem, torch.float32, device, ids)
    assert_within_budget(o, call.truth()[0], call.plain()[0], "o")
    assert_within_budget(lse, call.truth()[1], call.plain()[1], "lse")


@on
@both
def test_hidden_keys_and_values_are_not_used(module: str, device: str) -> None:
    """NaN in all that is hidden: in the future of the own block, past the counted slots, in other
    sequences."""
    skip_unless_runs("triton", device)
    problem = Problem(N=1, M=27, D=16, DV=16, BS=16, S=2)
    call = problem.make(device=device)
    k, v = (torch.cat([x, torch.full_like(x[:, :13], torch.nan)], 1) for x in (call.k, call.v))
    rows = query_rows(1, 1, 27, causal=True, cu_seqlens=None, device=torch.device(device))
    ids = torch.tensor([0, 1], dtype=torch.int32, device=device).expand(1, 2, 2).contiguous()
    o, _ = launch(module, call.q, k, v, ids, rows, block_size=16, scale=0.25)
    right, _ = launch(POINTERS, call.q, call.k, call.v, ids, rows, block_size=16, scale=0.25)
    assert torch.allclose(o, right, atol=1e-6)


def test_a_step_that_does_not_divide_a_block_is_refused() -> None:
    """By descriptors; with pointers it is right, and dropped tokens would be wrong without a
    word."""
    skip_unless_runs("triton", "cpu")
    problem = Problem(N=3, M=96, D=16, DV=16, BS=48, S=2)
    with pytest.raises(Exception, match="BT: expected a divisor of BS"):
        forward(DESCRIPTORS, problem, torch.float32, "cpu", BT=32)
    call, (o, _) = forward(POINTERS, problem, torch.float32, "cpu", BT=32)
    assert torch.allclose(o.double(), call.truth()[0], atol=1e-6)


@on
@pytest.mark.parametrize("number", [float("nan"), float("inf")], ids=str)
def test_a_hole_shows_nothing_of_what_is_loaded_in_its_place(number: float, device: str) -> None:
    """-1, an id past the end and the block that is visible in part, between two that are visible as
    a whole."""
    skip_unless_runs("triton", device)
    problem = Problem(N=1, M=72, D=16, DV=16, BS=16, S=5)
    ids = torch.tensor([2, -1, 99, 4, 0], dtype=torch.int32, device=device).expand(1, 1, 2, 5)
    call, (right, lse) = forward(POINTERS, problem, torch.float32, device, ids)
    hidden = ~call.mask()[0, 0].any(0)
    k, v = (x.masked_fill(hidden[:, None, None], number) for x in (call.k, call.v))
    rows = query_rows(1, 1, 72, causal=True, cu_seqlens=None, device=torch.device(device))

    def by_descriptors(v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lists = ids[0].contiguous()
        return launch(DESCRIPTORS, call.q, k, v, lists, rows, block_size=16, scale=0.25)

    o, lse_after = by_descriptors(v)
    assert torch.allclose(o, right, atol=1e-6)
    assert torch.allclose(lse, lse_after, atol=1e-6)
    v[:, 3, 0, 5] = number  # of block 0, the list's last, which holes load
    o, lse_after = by_descriptors(v)
    assert not o[0, 0, :3, 5].isfinite().any()
    assert torch.allclose(o[0, 0, 3:], right[0, 0, 3:], atol=1e-6)
    assert torch.allclose(lse, lse_after, atol=1e-6)


@pytest.mark.parametrize("BT", [16, 32, 64])
def test_any_step_gives_the_same(BT: int) -> None:
    """A step may be shorter than a block, as long, or longer."""
    skip_unless_runs("triton", "cpu")
    problem = Problem(N=3, M=70, D=16, DV=16, BS=32, S=2)
    call, (o, _) = forward(POINTERS, problem, torch.float32, "cpu", BT=BT)
    assert torch.allclose(o.double(), call.truth()[0], atol=1e-6)


def test_no_list_is_rewritten_for_a_long_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes a block in steps: 3 slots of 200 tokens stay 3."""
    skip_unless_runs("triton", "cpu")
    from nsa_tutorial.kernels.triton.selected import launch as triton_launch

    slots = []
    original = triton_launch.selected_forward
    monkeypatch.setattr(
        triton_launch,
        "selected_forward",
        lambda *a, **o: slots.append(a[3].shape[-1]) or original(*a, **o),
    )
    assert_right(Problem(N=3, M=450, BS=200, S=3).make(), "triton")
    assert slots
    assert set(slots) == {3}


@both
def test_the_operators_take_the_kernel_that_suits(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Descriptors where they can be used, and pointers everywhere else; lists alone, and beside
    windows."""
    skip_unless_runs("triton", "cpu")
    from nsa_tutorial.kernels.triton.selected import forward as triton_forward
    from nsa_tutorial.kernels.triton.selected import forward_tma as triton_descriptors
    from nsa_tutorial.kernels.triton.selected import launch as triton_launch
    from nsa_tutorial.kernels.triton.window.launch import window_forward

    taken = []
    for kernels in (triton_descriptors, triton_forward):
        original, name = kernels.launch, kernels.__name__.rpartition(".")[2]
        monkeypatch.setattr(
            kernels, "launch", lambda *a, f=original, n=name, **o: taken.append(n) or f(*a, **o)
        )
    monkeypatch.setattr(triton_descriptors, "can_walk", lambda *_: module == DESCRIPTORS)
    call = Problem(N=5, M=40, D=16, DV=16, BS=16, S=2).make()
    rows = query_rows(1, 5, 40, causal=True, cu_seqlens=None, device=call.q.device)
    ids = call.ids[0].to(torch.int32).contiguous()
    tensors, sizes = (call.q, call.k, call.v), {"block_size": 16, "scale": 0.25}
    o, lse = triton_launch.selected_forward(*tensors, ids, rows, **sizes)
    window = window_forward(*tensors, rows, window_size=7, scale=0.25)
    fused = triton_launch.selected_and_window_forward(*tensors, ids, rows, window_size=7, **sizes)
    assert taken == [module] * 2
    for found, lists, windows in zip(fused, (o, lse), window, strict=True):
        torch.testing.assert_close(found, torch.stack((lists, windows)))


@on
def test_autotune_takes_the_kernel(device: str) -> None:
    """As chapter 11 shows it: several configurations on a GPU, one for the interpreter."""
    skip_unless_runs("triton", device)
    import triton

    from nsa_tutorial.kernels.triton.selected import forward as triton_forward

    configs = [triton.Config({"BT": BT}, num_warps=1, num_stages=2) for BT in (16, 32)]
    tried = configs if device == "cuda" else configs[:1]
    tuned = triton.autotune(configs=tried, key=["G", "D", "DV", "BS"])(triton_forward.kernel)
    problem = Problem(N=5, M=40, D=16, DV=16, BS=32, S=2)
    call, (o, lse) = forward(POINTERS, problem, torch.float32, device)
    rows = query_rows(1, 5, 40, causal=True, cu_seqlens=None, device=call.q.device)
    ids = block_list(call.ids, rows, block_size=32, block_counts=None, include_own_block=False)
    grid, given = triton_forward.arguments(
        call.q, call.k, call.v, ids, rows, block_size=32, scale=0.25
    )
    tuned[grid](**given)
    assert tuned.best_config in tried
    torch.testing.assert_close((given["Output"], given["LSE"]), (o, lse))


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize(("G", "D"), [(100, 16), (128, 128), (128, 256)], ids=str)
@both
def test_groups_of_more_than_64_heads(module: str, G: int, D: int, dtype: torch.dtype) -> None:
    problem = Problem(N=20, M=200, H=2, G=G, D=D, DV=D, BS=64, S=3)
    call, (o, lse) = forward(module, problem, dtype, "cuda")
    assert_within_budget(o, call.truth()[0], call.plain()[0], "o")
    assert_within_budget(lse, call.truth()[1], call.plain()[1], "lse")


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 5], ids=["lists", "lists and windows"])
@pytest.mark.parametrize("D", [16, 24], ids=["descriptors", "pointers"])
def test_new_lengths_compile_nothing(D: int, window: int) -> None:
    """Queries, keys, batch, slots, windows and packing are open."""
    from nsa_tutorial.kernels.triton.selected import forward as triton_forward
    from nsa_tutorial.kernels.triton.selected import forward_tma as triton_descriptors

    def compiled() -> int:
        kernels = (triton_forward.kernel, triton_descriptors.descriptor_kernel)
        return sum(len(entry[0]) for kernel in kernels for entry in kernel.device_caches.values())

    def run(problem: Problem, window: int) -> None:
        call = problem.make(torch.float16, "cuda")
        if window:
            options = {name: x for name, x in call.options.items() if name != "causal"}
            ops.selected_and_window_attention(
                call.q, call.k, call.v, call.ids, window_size=window, **options, backend="triton"
            )
        else:
            call.run("triton")

    first = Problem(H=3, S=5, D=D, DV=16)
    run(first, window)
    before = compiled()
    for n, problem in enumerate(
        (
            replace(first, N=1, M=99),
            replace(first, B=3, N=33, M=44, S=16),
            replace(first, S=1, N=64, M=64, cu=(0, 7, 64)),
        )
    ):
        run(problem, window and window + n)
    assert compiled() == before


@pytest.mark.gpu
@both
def test_a_cache_longer_than_32_bits_hold(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kernels at the end of a cache of more than 2**31 elements, in a list and in a window."""
    from nsa_tutorial.kernels.triton.selected import forward_tma as triton_descriptors

    monkeypatch.setattr(triton_descriptors, "can_walk", lambda *_: module == DESCRIPTORS)
    H, D, BS, M = 8, 128, 64, 2**21 + 2**14 + 5
    k = torch.zeros(1, M, H, D, dtype=torch.float16, device="cuda")
    k[:, -200:] = torch.randn(1, 200, H, D, dtype=torch.float16, device="cuda")
    q = torch.randn(1, 3, H * 2, D, dtype=torch.float16, device="cuda")
    ids = torch.tensor([(M - 1) // BS], dtype=torch.int32, device="cuda").expand(1, 3, H, 1)
    near_ids = torch.zeros_like(ids)
    tail = k[:, (M - 1) // BS * BS :].contiguous()
    found = ops.selected_and_window_attention(
        q, k, k, ids, window_size=70, block_size=BS, backend="triton"
    )
    near = ops.selected_attention(q, tail, tail, near_ids, block_size=BS, backend="reference")
    window = ops.sliding_window_attention(
        q, k[:, -200:].contiguous(), k[:, -200:].contiguous(), window_size=70, backend="reference"
    )
    assert torch.allclose(found[0].float(), near.float(), atol=2e-3)
    assert torch.allclose(found[1].float(), window.float(), atol=2e-3)
