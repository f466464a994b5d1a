"""Wrong arguments are named before anything runs: what came, and what was expected. Here are
arguments that do not fit each other; `test_malformed_calls` has each one alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from selection import Problem

from nsa_tutorial import backends, ops
from nsa_tutorial.runtime import environment
from nsa_tutorial.sparse.compression import MLPWeights

BACKENDS = ("auto", "reference", "tilelang", "triton")
CALL = Problem(B=2, N=9, M=37).make()

WRONG = {
    "q is a list": (
        {"q": [1.0]},
        TypeError,
        r"q: got \[1\.0\] \(list\), expected a tensor of shape \[B, N, HQ, D\]",
    ),
    "more queries than keys": (
        {"k": CALL.k[:, :4], "v": CALL.v[:, :4]},
        ValueError,
        "q: got 9 queries for 4 keys, expected at most 4",
    ),
    "D over 256": (
        {"q": torch.zeros(2, 9, 6, 257), "k": torch.zeros(2, 37, 2, 257)},
        ValueError,
        "q and k: got width 257, expected 1 to 256",
    ),
    "counts a bool": ({"block_counts": True}, TypeError, r"block_counts: got True \(bool\)"),
    "factors in fp64 beside fp32": (
        {"slot_scale": torch.ones(2, 9, 2, 4, dtype=torch.float64)},
        TypeError,
        "slot_scale: got a float64 tensor.*expected float32",
    ),
    "cu_seqlens with a batch": (
        {"cu_seqlens": torch.tensor([0, 9], dtype=torch.int32)},
        ValueError,
        "cu_seqlens: got a batch of 2, expected 1",
    ),
}


@pytest.mark.parametrize("backend", ["auto", "reference", "tilelang"])
def test_an_order_of_another_backend(backend: str) -> None:
    """On CPU tensors, `auto` is the reference."""
    name = "reference" if backend == "auto" else backend
    with pytest.raises(ValueError, match=f"order: got 'tiles' on the {name} backend, expected 'au"):
        CALL.having(order="tiles").run(backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_argument(change: dict, error: type, message: str, backend: str) -> None:
    with pytest.raises(error, match=message):
        CALL.having(**change).run(backend)


def test_packed_queries_are_all_positions() -> None:
    call = Problem(N=9, M=20).make()
    with pytest.raises(ValueError, match="cu_seqlens: got 9 queries and 20 keys"):
        call.having(cu_seqlens=torch.tensor([0, 9])).run("reference")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (
            [0, 1, 0],
            r"a block twice in row \[0, 1, 0\], \[0, 1, 0\], expected distinct ids below 3, or -1",
        ),
        ([0, 3, -1], r"an id past the last block in row \[0, 1, 0\]"),
        ([0, -2, 1], "a negative id that is not -1"),
    ],
    ids=["twice", "past the end", "negative"],
)
def test_check_block_indices(ids: list[int], message: str) -> None:
    good = torch.tensor([2, -1, -1], dtype=torch.int32).expand(1, 4, 2, 3).clone()
    ops.check_block_indices(good, 37, block_size=16)
    good[0, 1, 0] = torch.tensor(ids)
    with pytest.raises(ValueError, match=message):
        ops.check_block_indices(good, 37, block_size=16)
    ops.check_block_indices(good, 37, block_size=16, block_counts=0)


def test_check_block_indices_counts_from_each_sequence() -> None:
    ids = torch.full((1, 20, 1, 1), 1)
    ops.check_block_indices(ids, 20, block_size=8)
    with pytest.raises(ValueError, match=r"past the last block in row \[0, 0, 0\].*below 1"):
        ops.check_block_indices(ids, 20, block_size=8, cu_seqlens=torch.tensor([0, 5, 20]))


# The other operators, over 37 keys of 2 heads and 6 query heads of width 24; summaries of 8 tokens
# every 4.
Q, K, V = torch.zeros(2, 37, 6, 24), torch.zeros(2, 37, 2, 24), torch.zeros(2, 37, 2, 40)
K_CMP, V_CMP, GATE = K[:, :8], V[:, :8], torch.ones(2, 37, 6)
IDS = torch.zeros(2, 37, 2, 4, dtype=torch.int32)
MLP = MLPWeights(
    torch.zeros(8, 24), torch.zeros(192, 5), torch.zeros(5), torch.zeros(5, 24), torch.zeros(24)
)


def window(**change: object) -> object:
    return ops.sliding_window_attention(**{"q": Q, "k": K, "v": V, "window_size": 5, **change})


def compress(**change: object) -> object:
    return ops.compress(**{"x": K, "length": 8, "stride": 4, **change})


def compressed(**change: object) -> object:
    return ops.compressed_attention(
        **{"q": Q, "k_cmp": K_CMP, "v_cmp": V_CMP, "length": 8, "stride": 4, **change}
    )


def select(**change: object) -> object:
    return ops.select_blocks(
        **{"q": Q, "k_cmp": K_CMP, "block_size": 8, "top_n": 4, "length": 8, "stride": 4, **change}
    )


def native(**change: object) -> object:
    gates = {"g_cmp": GATE, "g_slc": GATE, "g_swa": GATE}
    return ops.native_sparse_attention(
        **{"q": Q, "k": K, "v": V, **gates, "block_size": 8, "length": 8, "stride": 4, **change}
    )


WRONG_CALLS = {
    "window: more queries than keys": (
        window,
        {"k": K[:, :9], "v": V[:, :9]},
        ValueError,
        "q: got 37 queries for 9 keys",
    ),
    "compress: a weight for the mean": (
        compress,
        {"weight": K},
        ValueError,
        r"weight: got .*expected None for kind 'mean'",
    ),
    "compress: no weight": (
        compress,
        {"kind": "weighted"},
        TypeError,
        r"weight: got None .*of shape \[8\] or \[8, 2\]",
    ),
    "compress: weight of another length": (
        compress,
        {"kind": "weighted", "weight": torch.ones(7)},
        ValueError,
        r"weight: got .*\[7\].*expected shape \[8\] or \[8, 2\]",
    ),
    "compress: weight of integers": (
        compress,
        {"kind": "weighted", "weight": torch.ones(8, dtype=torch.int32)},
        TypeError,
        r"weight: got a int32 tensor.*expected a floating-point tensor",
    ),
    "compress: linear weight transposed": (
        compress,
        {"kind": "linear", "weight": torch.ones(24, 192)},
        ValueError,
        r"weight: got .*expected shape \[192, 24\] or \[2, 192, 24\]",
    ),
    "compress: weight elsewhere": (
        compress,
        {"kind": "weighted", "weight": torch.ones(8, device="meta")},
        ValueError,
        r"weight: got .*on meta, expected the device of x, cpu",
    ),
    "compress: a tensor for the MLP": (
        compress,
        {"kind": "mlp", "weight": torch.ones(8)},
        TypeError,
        r"weight: got .*expected an MLPWeights for kind 'mlp'",
    ),
    "compress: no bias": (
        compress,
        {"kind": "mlp", "weight": MLP._replace(b1=None)},
        TypeError,
        r"weight\.b1: got None .*expected a floating-point tensor of shape \[5\] or \[2, 5\]",
    ),
    "compress: hidden units disagree": (
        compress,
        {"kind": "mlp", "weight": MLP._replace(w2=torch.zeros(6, 24))},
        ValueError,
        r"weight\.w2: got .*expected shape \[5, 24\] or \[2, 5, 24\]",
    ),
    "compressed: another count": (
        compressed,
        {"k_cmp": K[:, :9], "v_cmp": V[:, :9]},
        ValueError,
        r"k_cmp: got 9 summaries, expected 8: those of 37 keys \(num_keys\) with length 8 and "
        r"stride 4",
    ),
    "compressed: num_keys missing": (
        compressed,
        {"q": Q[:, :5]},
        ValueError,
        r"k_cmp: got 8 summaries, expected 0: those of 5 keys",
    ),
    "compressed: packed, another num_keys": (
        compressed,
        {
            "q": Q[:1],
            "k_cmp": K_CMP[:1],
            "v_cmp": V_CMP[:1],
            "num_keys": 40,
            "cu_seqlens": torch.tensor([0, 37]),
        },
        ValueError,
        "num_keys: got 40, expected the number of queries, 37, for packed sequences",
    ),
    "compressed: packed, another count": (
        compressed,
        {
            "q": Q[:1],
            "k_cmp": K_CMP[:1],
            "v_cmp": V_CMP[:1],
            "cu_seqlens": torch.tensor([0, 18, 37]),
        },
        ValueError,
        "k_cmp: got 8 summaries, expected 6",
    ),
    "select: another count": (
        select,
        {"k_cmp": K[:, :9]},
        ValueError,
        "k_cmp: got 9 summaries, expected 8",
    ),
    "select: top_n too small": (
        select,
        {"top_n": 2},
        ValueError,
        r"top_n: got 2, expected at least num_initial \+ num_local = 3",
    ),
    "native: no gate": (
        native,
        {"g_cmp": None, "g_slc": None, "g_swa": None},
        ValueError,
        "g_cmp, g_slc, g_swa: got None for each, expected at least one gate",
    ),
    "native: gate of other heads": (
        native,
        {"g_swa": GATE[..., :2]},
        ValueError,
        r"g_swa: got .*expected \[B, N, HQ\] = \[2, 37, 6\]",
    ),
    "native: nothing to choose by": (
        native,
        {"g_cmp": None},
        ValueError,
        r"block_indices: got None, expected \[B, N, H, S\]: without g_cmp",
    ),
    "native: too few blocks": (
        native,
        {"block_counts": 2},
        ValueError,
        "block_counts: got 2, expected an int of at least 3",
    ),
    "native: counts of another shape": (
        native,
        {"block_counts": IDS[:, :, :1, 0]},
        ValueError,
        r"block_counts: got a int32 tensor.*expected \[B, N, H\]",
    ),
    "native: no counts": (
        native,
        {"block_counts": None},
        TypeError,
        "block_counts: got None, expected an int of at least 3",
    ),
}


@pytest.mark.parametrize(
    ("call", "change", "error", "message"), WRONG_CALLS.values(), ids=WRONG_CALLS.keys()
)
def test_wrong_argument_of_the_other_operators(
    call: Callable, change: dict, error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        call(**change)


@pytest.mark.parametrize("backend", ["tilelang", "triton"])
@pytest.mark.parametrize(
    ("call", "tensors"),
    [
        (compressed, {"q": Q, "k_cmp": K_CMP, "v_cmp": V_CMP}),
        (select, {"q": Q, "k_cmp": K_CMP}),
        (native, {"q": Q, "k": K, "v": V}),
    ],
    ids=["compressed", "select", "native"],
)
def test_no_kernel_computes_doubles(
    call: Callable, tensors: dict[str, torch.Tensor], backend: str
) -> None:
    doubles = {name: x.double() for name, x in tensors.items()}
    expected = f"q: got a float64 tensor.*expected float32, float16 or bfloat16 on the {backend} "
    with pytest.raises(TypeError, match=expected):
        call(**doubles, backend=backend)


@pytest.mark.parametrize("backend", ["reference", "tilelang", "triton"])
def test_every_operator_has_every_backend(backend: str) -> None:
    """And where a backend has a backward of its own, the function is there, too. What computes all
    branches at once is Triton's alone; `compositions` takes the others' operators."""
    if (reason := environment.detect().why_not(backend)) is not None:
        pytest.skip(reason)
    q = torch.zeros(1)
    alone = {"branches_at_once"} if backend != "triton" else set()
    for operator in backends.BACKENDS.keys() - alone:
        assert callable(backends.load(backends.BACKENDS, operator, backend, q))
    for operator, available in backends.BACKWARDS.items():
        if (backend in available or backend != "reference") and operator not in alone:
            assert callable(backends.load(backends.BACKWARDS, operator, backend, q))


@pytest.mark.parametrize(
    "backend", [pytest.param("tilelang", marks=pytest.mark.exhaustive), "triton"]
)
def test_branches_in_use_alone_need_a_backend(backend: str) -> None:
    """Selected attention has its kernels: with given blocks and no other branch, they run."""
    if (reason := environment.detect().why_not(backend)) is not None:
        pytest.skip(reason)
    q, k, v = (x[:1, :9, : x.shape[2] // 2, :16] + 1 for x in (Q, K, V))
    options = {"g_slc": GATE[:1, :9, :3], "block_indices": IDS[:1, :9, :1, :1], "block_size": 16}
    o = ops.native_sparse_attention(q, k, v, **options, backend=backend)
    assert torch.allclose(o, torch.ones_like(o), atol=1e-6)


def test_a_wrong_gate_raises_before_anything_is_summarised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "compress", lambda *_, **__: pytest.fail("it ran"))
    q, k, v = CALL.q, CALL.k, CALL.v
    with pytest.raises(ValueError, match=r"g_cmp: got .*expected \[B, N, HQ\]"):
        ops.native_sparse_attention(q, k, v, q[:, 1:, :, 0])
