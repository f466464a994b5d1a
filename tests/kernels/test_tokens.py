"""Lists of tokens, and of blocks of a few: a step gathers tokens of several slots, and the backward
adds to keys and values by atomics, or in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib import import_module
from itertools import product

import pytest
import torch
from places import name_of, places_of, skip_unless_runs
from selection import Call, Problem, assert_right, scaled_attention
from torch import Tensor

from nsa_tutorial.kernels import tokens
from nsa_tutorial.runtime import environment, lowering

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, in the interpreter
]
BACKENDS = ["triton", "tilelang"]
triton_first = places_of(BACKENDS, slow=["tilelang"])  # it compiles kernels of its own
PROBLEMS = {
    "tokens": Problem(N=3, M=90, BS=1, S=70),
    "tokens, fewer than a step": Problem(N=5, M=20, BS=1, S=3, G=1, own=True),
    "tokens, packed, factors": Problem(
        N=20, M=20, BS=1, S=9, cu=(0, 2, 2, 19, 20), factors=True, counts="random"
    ),
    "tokens, not causal": Problem(N=3, M=50, BS=1, S=40, causal=False, own=True),
    "tokens, group of 16": Problem(N=2, M=150, H=1, G=16, D=64, DV=64, BS=1, S=130),
    "tokens, widths 192 and 128": Problem(
        N=2, M=70, H=1, G=20, D=192, DV=128, BS=1, S=65, factors=True
    ),
    "blocks of 2": Problem(B=2, N=3, M=37, BS=2, S=19, factors=True),
    "blocks of 4": Problem(N=9, M=37, BS=4, S=9, own=True, counts="random"),
    "blocks of 4, packed, factors": Problem(
        N=20, M=20, BS=4, S=4, cu=(0, 2, 2, 19, 20), factors=True, counts="random"
    ),
    "blocks of 8": Problem(N=5, M=101, BS=8, S=12, causal=False, factors=True),
    "decoding": Problem(B=2, N=1, M=75, BS=1, S=20, D=128, DV=128),
    "nothing is visible": Problem(N=3, M=20, BS=1, counts=0),
}
QUICK = {
    ("triton", torch.float32): ["tokens, fewer than a step", "blocks of 8"],
    ("triton", torch.float16): [
        "tokens", "tokens, packed, factors", "blocks of 4", "tokens, group of 16",
    ],
    ("tilelang", torch.float16): ["blocks of 4, packed, factors"],
}  # fmt: skip


def cases() -> Iterator[object]:
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    for (name, problem), dtype, backend in product(PROBLEMS.items(), dtypes, BACKENDS):
        for device in ("cpu", "cuda"):
            if device == "cpu" and dtype == torch.bfloat16:
                continue
            is_quick = name in QUICK.get((backend, dtype), ())
            marks = [] if is_quick else [pytest.mark.exhaustive]
            marks = marks if device == "cpu" else [pytest.mark.gpu]
            label = f"{name}-{name_of(dtype)}-{backend}-{device}"
            yield pytest.param(problem, dtype, backend, device, id=label, marks=marks)


def gradients(call: Call, backend: str | None, dtype: torch.dtype) -> list[Tensor]:
    """Of queries, keys, values and factors: on a backend, or by the dense formula in `dtype`."""
    wide = torch.promote_types(dtype, torch.float32)
    leaves = {name: getattr(call, name).to(dtype).requires_grad_() for name in "qkv"}
    slot_scale = call.options.get("slot_scale")
    if slot_scale is not None:
        leaves["slot_scale"] = slot_scale.to(wide).requires_grad_()
    changed = call.having(**leaves)
    if backend is None:
        factors = changed.factors()
        factors = None if factors is None else factors.to(dtype)
        outputs = scaled_attention(*(leaves[x] for x in "qkv"), call.mask(), factors)
    else:
        outputs = changed.run(backend)
    g, loss = torch.Generator().manual_seed(3), 0
    for x in outputs:
        weight = torch.randn(x.shape, generator=g).to(x.device, x.dtype)
        loss = loss + (x.masked_fill(x == -torch.inf, 0) * weight).double().sum()
    return list(torch.autograd.grad(loss, list(leaves.values())))


@pytest.mark.parametrize(("problem", "dtype", "backend", "device"), list(cases()))
def test_error_budget(problem: Problem, dtype: torch.dtype, backend: str, device: str) -> None:
    """Of outputs and of gradients; those of keys and values come by atomics in half precision."""
    skip_unless_runs(backend, device, dtype)
    call = problem.make(dtype, device)
    assert_right(call, backend)
    right, rough = (gradients(call, None, kind) for kind in (torch.float64, dtype))
    for i, found in enumerate(gradients(call, backend, dtype)):
        budget = 2 * (rough[i].double() - right[i]).abs().max() + 1e-6 * right[i].abs().max() + 1e-6
        error = (found.double() - right[i]).abs().max()
        assert error <= budget, f"gradient {i}: {error:.2e} over {budget:.2e}"


@triton_first
def test_who_adds(device: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half precision by atomics, unless PyTorch is told to be deterministic; fp32 never. Both ways
    give the same, to rounding."""
    skip_unless_runs(backend, device, torch.float16)
    module, name, num_given = {  # what launches the kernel, with sums to add to behind the rest
        "triton": ("tokens_backward", "_launch", 3),
        "tilelang": ("backward_launch", "gradients_of_tokens", 2),
    }[backend]
    module = import_module(f"nsa_tutorial.kernels.{backend}.selected.{module}")
    made, run = [], getattr(module, name)
    monkeypatch.setattr(
        module, name, lambda *given: made.append(len(given) > num_given) or run(*given)
    )
    call = Problem(N=2, M=5, H=1, BS=1, S=2).make(torch.float16, device)
    free = gradients(call, backend, torch.float16)
    torch.use_deterministic_algorithms(True)
    try:
        fixed = gradients(call, backend, torch.float16)
    finally:
        torch.use_deterministic_algorithms(False)
    gradients(call, backend, torch.float32)
    assert made == [True, False, False]
    for a, b in zip(free, fixed, strict=True):
        torch.testing.assert_close(a, b, atol=2e-3, rtol=2e-3)


@triton_first
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=name_of)
def test_what_is_not_finite(device: str, backend: str, dtype: torch.dtype) -> None:
    """Hidden numbers leak nowhere, in forward and backward; a spoiled query spoils the gradients
    of the keys that it lists, and of no others."""
    skip_unless_runs(backend, device, dtype)
    call = Problem(N=6, M=40, H=1, G=2, D=16, DV=16, BS=1, S=3).make(dtype, device)
    ids = torch.arange(18, device=device, dtype=torch.int32).view(1, 6, 1, 3)
    call, clean = call.having(ids=ids), gradients(call.having(ids=ids), backend, dtype)
    k, v, q = call.k.clone(), call.v.clone(), call.q.clone()
    k[:, 18:], v[:, 18:] = torch.nan, torch.inf
    for a, b in zip(clean, gradients(call.having(k=k, v=v), backend, dtype), strict=True):
        torch.testing.assert_close(a, b, atol=0 if dtype == torch.float32 else 1e-3, rtol=1e-3)
    q[0, 2, 1, 3] = torch.nan  # lists 6, 7 and 8
    d_q, d_k, d_v = gradients(call.having(q=q), backend, dtype)
    of_query = torch.arange(18, device=device) // 3 == 2
    assert d_k[0, :18].isnan().flatten(1).all(1).equal(of_query)
    assert d_v[0, :18].isnan().flatten(1).all(1).equal(of_query)
    assert not d_k[0, :18][~of_query].isnan().any() and not d_v[0, :18][~of_query].isnan().any()
    assert d_q[0, 2, 1].isnan().all() and not d_q[0, [0, 1, 3, 4, 5]].isnan().any()


@triton_first
def test_ids_near_the_end_of_int32(device: str, backend: str) -> None:
    """Such a block's first token has no place in 32 bits."""
    skip_unless_runs(backend, device)
    call = Problem(N=2, M=20, BS=8, S=3).make(device=device)
    ids = torch.tensor([0, 2**28 + 1, 2**31 - 1], dtype=torch.int32, device=device)
    assert_right(call.having(ids=ids.expand(1, 2, 2, 3).contiguous()), backend)


def test_which_blocks_are_gathered() -> None:
    assert [n for n in range(1, 20) if tokens.gathers(n)] == [1, 2, 4, 8]


@pytest.mark.skipif(environment.detect().tilelang is None, reason="tilelang is not installed")
@pytest.mark.exhaustive
@pytest.mark.parametrize(("arch", "dtype", "sizes"), [
    ("sm_90", "bfloat16", (64, 256, 256)), ("sm_80", "float16", (1, 80, 48)),
])  # fmt: skip
def test_kernels_lower(arch: str, dtype: str, sizes: tuple[int, ...]) -> None:
    """Loads run a step ahead, and gradients of keys and values are added where they lie."""
    from nsa_tutorial.kernels.tilelang import launch_options as choose
    from nsa_tutorial.kernels.tilelang.compiling import ALL_THREADS_LOAD
    from nsa_tutorial.kernels.tilelang.selected import tokens_backward, tokens_forward

    (G, D, DV), kinds = sizes, {"has_factors": True}
    forward = choose.token_options(G, D, DV, 2)
    backward = choose.token_gradient_options(G, D, DV, 2, adds=True)
    first, second = (
        lowering.cuda(build(2, *sizes, dtype, **options, **kinds), arch, ALL_THREADS_LOAD)
        for build, options in (
            (tokens_forward.build_kernel, forward),
            (partial(tokens_backward.build_gradients, adds=True), backward),
        )
    )
    for source in (first, second):
        assert source.count("cp_async_gs_conditional<16>") >= 4 and "mma" in source
    assert "AtomicAdd" in second and "AtomicAdd" not in first


@pytest.mark.skipif(environment.detect().triton is None, reason="triton is not installed")
@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_kernels_become_ptx(dtype: str) -> None:
    """With the tensor cores, and with additions that nobody waits for."""
    folder = "nsa_tutorial.kernels.triton.selected"
    ints = dict.fromkeys(("BlockIndices", "FirstKey", "NumVisible"), "*i32")
    given = dict.fromkeys(("Q", "K", "V", "Output", "GradO", "GradQ"), f"*{dtype}")
    wide = ("LSE", "Delta", "LSE2", "SumK", "SumV", "SlotScale", "GradSlotScale")
    types = {**ints, **given, **dict.fromkeys(wide, "*fp32"), "scale": "fp32", "scale_log2": "fp32"}
    sizes = {"G": 16, "D": 128, "DV": 128, "GT": 16, "DT": 128, "DVT": 128, "BT": 32, "BS": 1}
    options = {"num_warps": 4, "num_stages": 2}
    forward = {**sizes, "SlotScale": None}
    backward = {**sizes, "SLOT_SCALE": True, "ATOMICS": True}
    first, second = lowering.all_stages([
        lowering.request(f"{folder}.tokens_forward:tokens_kernel", forward, types, **options),
        lowering.request(f"{folder}.tokens_backward:gradient_kernel", backward, types, **options),
    ])  # fmt: skip
    for stages in (first, second):
        assert ("mma" in stages["ptx"]) == (dtype != "fp32")
    assert "red.global" in second["ptx"] or "red.relaxed" in second["ptx"]
