"""Wrong arguments are named before anything runs: what came, and what was expected."""

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
PACKED = Problem(N=20, M=20, cu=(0, 20)).make()
half = CALL.q.half()

WRONG = {
    "q is a list": (
        {"q": [1.0]},
        TypeError,
        r"q: got \[1\.0\] \(list\), expected a tensor of shape \[B, N, HQ, D\]",
    ),
    "q of rank 3": (
        {"q": CALL.q[0]},
        ValueError,
        r"q: got a float32 tensor of shape \[9, 6, 24\].*expected 4 dimensions",
    ),
    "q of integers": ({"q": CALL.q.int()}, TypeError, "q: got a int32 tensor.*expected float32"),
    "k of another dtype": (
        {"k": CALL.k.half()},
        TypeError,
        "k: got a float16 tensor.*expected the dtype of q, float32",
    ),
    "v of another dtype": (
        {"v": CALL.v.double()},
        TypeError,
        "v: got a float64 tensor.*expected the dtype of q",
    ),
    "k of another batch": ({"k": CALL.k[:1]}, ValueError, "k: got .*expected the batch of q, 2"),
    "k of another width": (
        {"k": CALL.k[..., :8]},
        ValueError,
        "k: got .*expected the width of q, 24",
    ),
    "v of another length": (
        {"v": CALL.v[:, :5]},
        ValueError,
        r"v: got .*positions and heads of k, \[2, 37, 2\]",
    ),
    "v of other heads": ({"v": CALL.v[:, :, :1]}, ValueError, "v: got .*positions and heads of k"),
    "HQ no multiple of H": (
        {"q": CALL.q[:, :, :5]},
        ValueError,
        "got 5 query heads over 2 key/value heads, expected a multiple",
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
    "DV over 256": (
        {"v": torch.zeros(2, 37, 2, 300)},
        ValueError,
        "v: got width 300, expected 1 to 256",
    ),
    "an order that there is not": (
        {"order": "rows"},
        ValueError,
        "order: got 'rows', expected one of auto, queries, tiles, blocks",
    ),
    "float indices": (
        {"ids": CALL.ids.float()},
        TypeError,
        "block_indices: got a float32 tensor.*expected int32 or int64",
    ),
    "indices of rank 3": (
        {"ids": CALL.ids[0]},
        ValueError,
        r"block_indices: .*expected 4 dimensions, \[B, N, H, S\]",
    ),
    "indices for query heads": (
        {"ids": CALL.ids.repeat(1, 1, 3, 1)},
        ValueError,
        r"block_indices: got .*\[2, 9, 6, 4\].*\[B, N, H\] = \[2, 9, 2\]",
    ),
    "no slot": (
        {"ids": CALL.ids[..., :0]},
        ValueError,
        "block_indices: got .*expected at least one slot",
    ),
    "block_size 0": (
        {"block_size": 0},
        ValueError,
        "block_size: got 0, expected an int of at least 1",
    ),
    "block_size -1": ({"block_size": -1}, ValueError, "block_size: got -1"),
    "block_size a float": (
        {"block_size": 16.0},
        TypeError,
        r"block_size: got 16\.0 \(float\), expected an int",
    ),
    "counts negative": (
        {"block_counts": -1},
        ValueError,
        "block_counts: got -1, expected an int of at least 0",
    ),
    "counts a bool": ({"block_counts": True}, TypeError, r"block_counts: got True \(bool\)"),
    "factors of another shape": (
        {"slot_scale": torch.ones(2, 9, 6, 4)},
        ValueError,
        r"slot_scale: got .*expected the shape of block_indices, \[B, N, H, S\] = \[2, 9, 2, 4\]",
    ),
    "factors of rank 3": (
        {"slot_scale": torch.ones(2, 9, 2)},
        ValueError,
        r"slot_scale: got .*expected 4 dimensions, \[B, N, H, S\]",
    ),
    "factors in half precision": (
        {"slot_scale": torch.ones(2, 9, 2, 4, dtype=torch.float16)},
        TypeError,
        "slot_scale: got a float16 tensor.*expected float32",
    ),
    "factors in fp64 beside fp32": (
        {"slot_scale": torch.ones(2, 9, 2, 4, dtype=torch.float64)},
        TypeError,
        "slot_scale: got a float64 tensor.*expected float32",
    ),
    "factors on another device": (
        {"slot_scale": torch.ones(2, 9, 2, 4, device="meta")},
        ValueError,
        "slot_scale: got .*expected the device of q, cpu",
    ),
    "one factor": ({"slot_scale": 0.5}, TypeError, r"slot_scale: got 0\.5 \(float\)"),
    "counts of another shape": (
        {"block_counts": torch.zeros(2, 9, 6, dtype=torch.int32)},
        ValueError,
        r"block_counts: got .*expected \[B, N, H\] = \[2, 9, 2\]",
    ),
    "counts of floats": (
        {"block_counts": torch.zeros(2, 9, 2)},
        TypeError,
        "block_counts: got a float32 tensor",
    ),
    "scale 0": (
        {"scale": 0},
        ValueError,
        "scale: got 0, expected a positive finite number or None",
    ),
    "scale negative": ({"scale": -0.1}, ValueError, "scale: got -0.1"),
    "scale infinite": ({"scale": float("inf")}, ValueError, "scale: got inf"),
    "scale a string": ({"scale": "1"}, TypeError, "scale: got '1'"),
    "causal not a bool": (
        {"causal": 1},
        TypeError,
        r"causal: got 1 \(int\), expected True or False",
    ),
    "own block not a bool": ({"include_own_block": None}, TypeError, "include_own_block: got None"),
    "cu_seqlens with a batch": (
        {"cu_seqlens": torch.tensor([0, 9], dtype=torch.int32)},
        ValueError,
        "cu_seqlens: got a batch of 2, expected 1",
    ),
}

WRONG_PACKED = {
    "a list": ([0, 20], TypeError, r"cu_seqlens: got \[0, 20\] \(list\)"),
    "of floats": (torch.tensor([0.0, 20.0]), TypeError, "cu_seqlens: got a float32 tensor"),
    "of rank 2": (torch.tensor([[0, 20]]), ValueError, "cu_seqlens: .*expected 1 dimensions"),
    "not from 0": (
        torch.tensor([1, 20]),
        ValueError,
        r"cu_seqlens: got \[1, 20\], expected at least two offsets, the first 0",
    ),
    "one offset": (torch.tensor([0]), ValueError, "cu_seqlens: .*at least two offsets"),
    "not to N": (
        torch.tensor([0, 19]),
        ValueError,
        "cu_seqlens: got a last offset of 19, expected the number of positions, 20",
    ),
    "decreasing": (
        torch.tensor([0, 9, 5, 20]),
        ValueError,
        "cu_seqlens: .*expected offsets that never decrease",
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("offsets", "error", "message"), WRONG_PACKED.values(), ids=WRONG_PACKED.keys()
)
def test_wrong_cu_seqlens(offsets: object, error: type, message: str, backend: str) -> None:
    with pytest.raises(error, match=message):
        PACKED.having(cu_seqlens=offsets).run(backend)


def test_packed_queries_are_all_positions() -> None:
    call = Problem(N=9, M=20).make()
    with pytest.raises(ValueError, match="cu_seqlens: got 9 queries and 20 keys"):
        call.having(cu_seqlens=torch.tensor([0, 9])).run("reference")


def test_return_lse_is_a_bool() -> None:
    with pytest.raises(TypeError, match="return_lse: got 1"):
        ops.selected_attention(CALL.q, CALL.k, CALL.v, CALL.ids, return_lse=1)


def test_unknown_backend() -> None:
    with pytest.raises(
        ValueError,
        match=r"backend: got 'cuda' \(str\), expected one of auto, reference, tilelang, triton",
    ):
        CALL.run("cuda")


@pytest.mark.parametrize("name", ["k", "v", "ids", "block_counts", "cu_seqlens"])
def test_devices_must_agree(name: str) -> None:
    """The meta device stands in for a second one."""
    if name == "cu_seqlens":
        call = PACKED.having(cu_seqlens=PACKED.options["cu_seqlens"].to("meta"))
    elif name == "block_counts":
        call = CALL.having(block_counts=torch.zeros(2, 9, 2, dtype=torch.int32, device="meta"))
    else:
        call = CALL.having(**{name: getattr(CALL, name).to("meta")})
    with pytest.raises(
        ValueError,
        match=f"{'block_indices' if name == 'ids' else name}: got .* on meta, expected the "
        "device of q, cpu",
    ):
        call.run("reference")


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
    "window: q of rank 3": (
        window,
        {"q": Q[0]},
        ValueError,
        r"q: got .*expected 4 dimensions, \[B, N, HQ, D\]",
    ),
    "window: v of another dtype": (
        window,
        {"v": V.half()},
        TypeError,
        r"v: got a float16 tensor.*expected the dtype of q",
    ),
    "window: more queries than keys": (
        window,
        {"k": K[:, :9], "v": V[:, :9]},
        ValueError,
        "q: got 37 queries for 9 keys",
    ),
    "window: of 0": (
        window,
        {"window_size": 0},
        ValueError,
        "window_size: got 0, expected an int of at least 1",
    ),
    "window: a float": (
        window,
        {"window_size": 5.0},
        TypeError,
        r"window_size: got 5\.0 \(float\)",
    ),
    "window: scale": (
        window,
        {"scale": -1},
        ValueError,
        "scale: got -1, expected a positive finite number or None",
    ),
    "window: return_lse": (window, {"return_lse": 1}, TypeError, "return_lse: got 1"),
    "window: cu_seqlens with a batch": (
        window,
        {"cu_seqlens": torch.tensor([0, 37])},
        ValueError,
        "cu_seqlens: got a batch of 2",
    ),
    "compress: x of integers": (
        compress,
        {"x": K.int()},
        TypeError,
        r"x: got a int32 tensor.*expected float32",
    ),
    "compress: x of rank 3": (
        compress,
        {"x": K[0]},
        ValueError,
        r"x: got .*expected 4 dimensions, \[B, M, H, D\]",
    ),
    "compress: unknown kind": (
        compress,
        {"kind": "max"},
        ValueError,
        r"kind: got 'max' \(str\), expected one of mean, weighted, ",
    ),
    "compress: length 0": (
        compress,
        {"length": 0},
        ValueError,
        "length: got 0, expected an int of at least 1",
    ),
    "compress: stride a float": (
        compress,
        {"stride": 4.0},
        TypeError,
        r"stride: got 4\.0 \(float\)",
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
    "compress: cu_seqlens": (
        compress,
        {"x": K[:1], "cu_seqlens": torch.tensor([0, 9])},
        ValueError,
        "cu_seqlens: got a last offset",
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
    "compressed: num_keys below N": (
        compressed,
        {"num_keys": 36},
        ValueError,
        "num_keys: got 36, expected an int of at least 37",
    ),
    "compressed: v_cmp of another count": (
        compressed,
        {"v_cmp": V[:, :7]},
        ValueError,
        r"v_cmp: got .*expected the batch, positions and heads of k_cmp, \[2, 8, 2\]",
    ),
    "compressed: k_cmp of another width": (
        compressed,
        {"k_cmp": K_CMP[..., :8]},
        ValueError,
        r"k_cmp: got .*width of q, 24",
    ),
    "compressed: heads": (
        compressed,
        {"q": Q[:, :, :5]},
        ValueError,
        "q and k_cmp: got 5 query heads over 2 key/value heads",
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
    "select: top_n 0": (
        select,
        {"top_n": 0},
        ValueError,
        "top_n: got 0, expected an int of at least 1",
    ),
    "select: top_n too small": (
        select,
        {"top_n": 2},
        ValueError,
        r"top_n: got 2, expected at least num_initial \+ num_local = 3",
    ),
    "select: block_size 0": (select, {"block_size": 0}, ValueError, "block_size: got 0"),
    "select: num_local negative": (
        select,
        {"num_local": -1},
        ValueError,
        "num_local: got -1, expected an int of at least 0",
    ),
    "select: lse of other heads": (
        select,
        {"lse": GATE[..., :2]},
        ValueError,
        r"lse: got .*expected \[B, N, HQ\] = \[2, 37, 6\]",
    ),
    "select: lse of integers": (select, {"lse": GATE.int()}, TypeError, "lse: got a int32 tensor"),
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
    "native: a number for a gate": (
        native,
        {"g_cmp": 0.5},
        TypeError,
        r"g_cmp: got 0\.5 \(float\), expected a tensor",
    ),
    "native: gate elsewhere": (
        native,
        {"g_slc": GATE.to("meta")},
        ValueError,
        r"g_slc: got .*on meta, expected the device of q",
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
    "native: indices for query heads": (
        native,
        {"block_indices": IDS.repeat(1, 1, 3, 1)},
        ValueError,
        r"block_indices: got .*\[B, N, H\] = \[2, 37, 2\]",
    ),
    "native: window of 0": (native, {"window_size": 0}, ValueError, "window_size: got 0"),
    "native: length 0": (native, {"length": 0}, ValueError, "length: got 0"),
    "native: unknown backend": (
        native,
        {"backend": "cuda"},
        ValueError,
        r"backend: got 'cuda' \(str\)",
    ),
}


def test_the_calls_are_right_without_a_change() -> None:
    for call in (window, compress, compressed, select, native):
        call()
    compress(kind="mlp", weight=MLP)


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
    """And where a backend has a backward of its own, the function is there, too."""
    if (reason := environment.detect().why_not(backend)) is not None:
        pytest.skip(reason)
    q = torch.zeros(1)
    for operator in backends.BACKENDS:
        assert callable(backends.load(backends.BACKENDS, operator, backend, q))
    for operator, available in backends.BACKWARDS.items():
        if backend in available or backend != "reference":
            assert callable(backends.load(backends.BACKWARDS, operator, backend, q))


@pytest.mark.parametrize("backend", ["tilelang", "triton"])
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
