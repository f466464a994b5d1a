"""The same malformed calls to every operator: each names the argument, and all give the same reason
for the same mistake. What only looks malformed gives the right result."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from places import skip_unless_runs
from torch import Tensor

from nsa_tutorial import interop, ops

N, HQ, H, D, DV = 8, 4, 2, 8, 16
Args = dict[str, object]


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


Q, K, V, GATE = draw(1, N, HQ, D), draw(1, N, H, D), draw(1, N, H, DV), draw(1, N, HQ)
SIZES = {"length": 4, "stride": 2}
K_CMP, V_CMP = (ops.compress(x, **SIZES) for x in (K, V))
LISTS = {"block_indices": torch.tensor([1, 0]).expand(1, N, H, 2).clone(), "block_counts": 2}
LISTS |= {"block_size": 4, "slot_scale": torch.ones(1, N, H, 2)}
GATES = {"g_cmp": GATE, "g_slc": GATE, "g_swa": GATE}
SHARED = {"scale": 0.5, "cu_seqlens": None, "backend": "auto"}
WINDOW = {"window_size": 3}
LSE = {"return_lse": False}


@dataclass(frozen=True)
class Operator:
    """An operator, a right call of it, the names that it gives to keys and values, and the tensor
    whose device and batch the others must have."""

    function: Callable
    call: Args
    names: dict[str, str] = field(default_factory=dict)
    first: str = "q"

    def changed(self, changes: Args) -> Args | None:
        """The call with other arguments, or None if the operator lacks one of them. A function
        makes the new argument of the old one."""
        call = dict(self.call)
        for role, change in changes.items():
            name = self.names.get(role, role)
            if name not in call:
                return None
            makes = callable(change) and not isinstance(change, Tensor)
            call[name] = change(call[name]) if makes else change
        return call

    def run(self, call: Args) -> Tensor:
        out = self.function(**call)
        return torch.cat(out, -1) if isinstance(out, tuple) else out

    def plain(self, message: str) -> str:
        """The reason of an error, without this operator's names."""
        reason = message.partition(", expected ")[2].replace("M_c", "M")
        for role, name in {"q": self.first, **self.names}.items():
            reason = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", role, reason)
        return re.sub(r"\[[\d, ]+\]", "[…]", reason)  # shapes are each operator's own


def three_branches(**call: object) -> Tensor:
    gates = [call.pop(name) for name in GATES]
    pair = (call.pop("selected[0]"), call.pop("selected[1]"))
    return ops.three_branches(
        compressed=(K_CMP, V_CMP), selected=pair, window=(), gates=gates, **call
    )


QKV = {"q": Q, "k": K, "v": V}
PAIR = {"k": "selected[0]", "v": "selected[1]"}
FLAGS = {"learn_choice": False, "nonnegative_gates": False}
ALL = {**GATES, **SIZES, **WINDOW, **SHARED, **LISTS, **FLAGS, "order": "auto"}
OWN = {"include_own_block": False, "order": "auto"}
OPERATORS = {
    "selected": Operator(
        ops.selected_attention, {**QKV, **LISTS, **SHARED, **LSE, **OWN, "causal": True}
    ),
    "window": Operator(ops.sliding_window_attention, {**QKV, **WINDOW, **SHARED, **LSE}),
    "both": Operator(
        ops.selected_and_window_attention, {**QKV, **LISTS, **WINDOW, **SHARED, **LSE, **OWN}
    ),
    "compress": Operator(
        ops.compress, {"x": K, **SIZES, "kind": "mean", "cu_seqlens": None, "backend": "auto"},
        {"k": "x"},
        first="x",
    ),
    "compressed": Operator(
        ops.compressed_attention,
        {"q": Q, "k_cmp": K_CMP, "v_cmp": V_CMP, **SIZES, **SHARED, **LSE, "num_keys": N},
        {"k": "k_cmp", "v": "v_cmp"},
    ),
    "select": Operator(
        ops.select_blocks,
        {
            "q": Q, "k_cmp": K_CMP, **SIZES, **SHARED, "num_keys": N, "lse": None, "top_n": 3,
            "block_size": 4, "block_counts": None, "num_initial": 1, "num_local": 2, "pool": "sum",
        },
        {"k": "k_cmp"},
    ),
    "index": Operator(
        ops.index_blocks,
        {"q_idx": Q, "k_idx": K[:, :, 0], "cu_seqlens": None, "backend": "auto", "top_n": 3,
         "block_size": 4, "num_initial": 1, "num_local": 2},
        first="q_idx",
    ),
    "loss": Operator(
        ops.index_loss,
        {"q": Q, "k": K, "q_idx": Q, "k_idx": K[:, :, 0], "kv_heads": H, "block_size": 4,
         "block_indices": LISTS["block_indices"], "scale": None, "cu_seqlens": None},
    ),
    "native": Operator(ops.native_sparse_attention, {**QKV, **ALL}),
    "three": Operator(
        three_branches,
        {"q": Q, "selected[0]": K, "selected[1]": V, **ALL, "num_keys": N}, PAIR,
    ),
    "check": Operator(
        ops.check_block_indices,
        {"block_indices": LISTS["block_indices"], "M": N, "block_size": 4, "block_counts": 2,
         "cu_seqlens": None},
        first="block_indices",
    ),
}  # fmt: skip


def on(x: object) -> object:
    return x.to("meta")


def rank(x: Tensor) -> Tensor:
    return x[0]


def less(x: Tensor) -> Tensor:
    return x[:, 1:]


def listed(x: Tensor) -> list:
    return x.tolist()


def other_heads(x: Tensor) -> Tensor:
    return torch.cat([x, x], 2)


NOT_TENSORS = {"list": [1.0] * 5000, "None": None, "str": "x" * 5000, "int": 3}
NOT_TENSORS["array"] = np.zeros((1, N, HQ, D))
NOT_INTS = {"float": 4.0, "str": "4", "bool": True, "numpy": np.int64(4), "list": [4]}
TOO_LARGE = {"2**31": 2**31, "2**40": 2**40, "10**5000": 10**5000}
CASES: dict[str, tuple[str, Args]] = {}


for role in ("q", "k", "v"):
    for name, value in NOT_TENSORS.items():
        CASES[f"{role}: {name}"] = (role, {role: value})
    CASES[f"{role}: rank"] = (role, {role: rank})
    CASES[f"{role}: ints"] = (role, {role: lambda x: x.int()})
for role in ("block_indices", "slot_scale", "g_cmp", "g_slc", "g_swa"):
    for name in ("list", "str", "array", "int"):
        CASES[f"{role}: {name}"] = (role, {role: NOT_TENSORS[name]})
    CASES[f"{role}: rank"] = (role, {role: rank})
    for name, change in {"meta": on, "positions": less, "heads": other_heads}.items():
        CASES[f"{role}: {name}"] = (role, {role: change, "q": Q})
    CASES[f"{role}: dtype"] = (role, {role: lambda x: x.to(torch.complex64)})
for role in ("k", "v"):
    CASES[f"{role}: dtype"] = (role, {role: lambda x: x.half(), "q": Q})
    CASES[f"{role}: meta"] = (role, {role: on, "q": Q})
    CASES[f"{role}: batch"] = (role, {role: lambda x: torch.cat([x, x]), "q": Q})
CASES |= {
    "k: width": ("k", {"k": lambda x: x[..., 1:], "q": Q}),
    "v: positions": ("v", {"v": less}),
    "v: heads": ("v", {"v": other_heads}),
    "v: width 0": ("v", {"v": lambda x: x[..., :0]}),
    "v: width 300": ("v", {"v": lambda x: draw(*x.shape[:3], 300)}),
    "q: heads": ("q", {"q": Q[:, :, :3]}),
    "q: no heads": ("q", {"q": Q[:, :, :0]}),
    "q: width 0": ("q", {"q": Q[..., :0], "k": lambda x: x[..., :0], **LSE}),
    "q: width 257": (
        "q",
        {"q": draw(1, N, HQ, 257), "k": lambda x: draw(*x.shape[:3], 257), **LSE},
    ),
    "block_indices: no slot": ("block_indices", {"block_indices": lambda x: x[..., :0]}),
    "block_indices: floats": ("block_indices", {"block_indices": lambda x: x.float()}),
    "slot_scale: half": ("slot_scale", {"slot_scale": lambda x: x.half()}),
    "slot_scale: slots": ("slot_scale", {"slot_scale": lambda x: x[..., 1:]}),
    "lse: heads": ("lse", {"lse": GATE[..., 1:]}),
    "lse: ints": ("lse", {"lse": GATE.int()}),
    "M: less than N": ("M", {"M": N - 1}),
    "num_keys: less than N": ("num_keys", {"num_keys": N - 1}),
    "kind: unknown": ("kind", {"kind": "max"}),
    "pool: unknown": ("pool", {"pool": "mean"}),
    "kind: array": ("kind", {"kind": np.zeros(3)}),
    "block_counts: negative": ("block_counts", {"block_counts": -1}),
    "block_counts: floats": ("block_counts", {"block_counts": torch.ones(1, N, H)}),
    "block_counts: rank": ("block_counts", {"block_counts": torch.ones(N, H, dtype=torch.int32)}),
    "block_counts: heads": ("block_counts", {"block_counts": torch.ones(1, N, 3).int()}),
    "block_counts: meta": ("block_counts", {"block_counts": torch.ones(1, N, H).int().to("meta")}),
}
INTS = ("block_size", "length", "stride", "top_n", "num_initial", "num_local", "num_keys", "M")
for role in (*INTS, "window_size", "block_counts"):
    wrong = {**NOT_INTS, "negative": -1, "-10**5000": -(10**5000)}
    wrong |= {} if role == "window_size" else TOO_LARGE
    wrong |= {} if role in ("num_initial", "num_local", "block_counts") else {"0": 0}
    for name, value in wrong.items():
        CASES[f"{role}: {name}"] = (role, {role: value})
for role in ("return_lse", "include_own_block", "causal", "learn_choice", "nonnegative_gates"):
    for name, value in {"int": 1, "None": None, "tensor": torch.tensor(True)}.items():
        CASES[f"{role}: {name}"] = (role, {role: value})
for role in ("backend", "order"):
    for name, value in {"unknown": "rows", "None": None, "array": np.zeros(3), "int": 3}.items():
        CASES[f"{role}: {name}"] = (role, {role: value})
for name, value in {
    "0": 0, "negative": -1.0, "NaN": float("nan"), "infinite": float("inf"), "bool": True,
    "str": "1", "array": np.ones(1), "tensor": torch.ones(2), "list": [0.5], "huge": 10**400,
}.items():  # fmt: skip
    CASES[f"scale: {name}"] = ("scale", {"scale": value})
for name, value in {
    "list": [0, N], "floats": torch.tensor([0.0, N]), "rank": torch.tensor([[0, N]]), "str": "0",
    "array": np.array([0, N]), "one offset": torch.tensor([0]), "none": torch.tensor([]).int(),
    "not from 0": torch.tensor([1, N]), "not to N": torch.tensor([0, N - 1]),
    "decreasing": torch.tensor([0, 5, 3, N]), "short ints": torch.tensor([0, N]).short(),
    "meta": torch.tensor([0, N]).to("meta"),
}.items():  # fmt: skip
    CASES[f"cu_seqlens: {name}"] = ("cu_seqlens", {"cu_seqlens": value})


def test_the_calls_are_right_without_a_change() -> None:
    for operator in OPERATORS.values():
        operator.function(**operator.call)


@pytest.mark.parametrize(("argument", "changes"), CASES.values(), ids=CASES.keys())
def test_a_mistake_has_one_reason(argument: str, changes: Args) -> None:
    """On every operator that has the argument, on the reference and where kernels would run."""
    reasons = {}
    for name, operator in OPERATORS.items():
        for backend in ("reference", "triton"):
            call = operator.changed(changes)
            if call is None:
                continue
            if "backend" in call and argument != "backend":
                call["backend"] = backend
            with pytest.raises((ValueError, TypeError)) as error:
                operator.function(**call)
            message = str(error.value)
            shown = operator.names.get(argument, argument)
            assert message.startswith((f"{shown}: ", f"{shown} and ")), (name, message)
            assert ": got " in message and len(message) < 250, (name, message)
            reasons.setdefault(operator.plain(message), name)
    assert len(reasons) == 1, reasons


# -- branches that do not fit each other --

BRANCHES = {"q": Q, "compressed": (K_CMP, V_CMP), "selected": (K, V), "window": (K, V)}
BRANCHES |= {"gates": (GATE,) * 3, "num_keys": N, "block_counts": 3, "block_size": 4}
BRANCHES |= {"window_size": 3, **SIZES}
MISFITS: dict[str, tuple[Args, str]] = {
    "fewer keys in the window": ({"window": (K[:, :5], V[:, :5])}, "window[0]: got 5 keys"),
    "fewer values": ({"selected": (K, V[:, :5])}, "selected[1]: got"),
    "another batch": ({"selected": (K, torch.cat([V, V]))}, "selected[1]: got"),
    "narrow keys": ({"selected": (K[..., :4], V)}, "selected[0]: got"),
    "narrow values": ({"window": (K, V[..., :4])}, "window[1]: got"),
    "wide keys": ({"window": (draw(1, N, H, 300), V)}, "window[0]: got"),
    "half values": ({"window": (K, V.half())}, "window[1]: got"),
    "one head": ({"window": (K[:, :, :1], V[:, :, :1])}, "window[0]: got"),
    "more num_keys": ({"num_keys": N + 1}, "selected[0]: got 8 keys, expected num_keys, 9"),
    "another num_keys": ({"num_keys": N + 2}, "compressed[0]: got 3 summaries, expected 4"),
    "fewer summaries": ({"compressed": (K_CMP[:, 1:], V_CMP[:, 1:])}, "compressed[0]: got 2 summ"),
    "no selection": ({"selected": ()}, "selected: got none, expected keys and values"),
    "no window": ({"selected": (), "window": ()}, "selected: got none, expected keys and values"),
    "no pairs": ({"compressed": (), "selected": (), "window": ()}, "compressed: got none"),
    "None": ({"window": None}, "window: got None (NoneType), expected a tuple of keys"),
    "three tensors": ({"selected": (K, V, V)}, "selected: got a tuple of 3, expected a tuple of"),
    "lists in a pair": ({"selected": (K.tolist(), V)}, "selected[0]: got"),
    "two gates": ({"gates": (GATE, GATE)}, "gates: got a tuple of 2, expected a tuple of three"),
    "one tensor of gates": ({"gates": torch.stack([GATE] * 3)}, "gates: got a float32 tensor"),
    "no gates": ({"gates": (None,) * 3}, "g_cmp, g_slc, g_swa: got None for each"),
    "ints": ({"q": Q.int()}, "q: got a int32 tensor"),
    "no q": ({"q": None}, "q: got None (NoneType)"),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize(("changes", "message"), MISFITS.values(), ids=MISFITS.keys())
def test_branches_fit_each_other(changes: Args, message: str, backend: str) -> None:
    with pytest.raises((ValueError, TypeError), match="^" + re.escape(message)):
        ops.three_branches(**BRANCHES | changes, backend=backend)


def test_a_branch_without_a_gate_needs_no_keys() -> None:
    """And all take autocast's dtype."""
    alone = ops.three_branches(
        **BRANCHES | {"compressed": [], "selected": (), "gates": [None, None, GATE]}
    )
    right = GATE[..., None] * ops.sliding_window_attention(Q, K, V, window_size=3)
    torch.testing.assert_close(alone, right)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = BRANCHES | {"selected": (K.bfloat16(), V)}
        assert ops.three_branches(**mixed).dtype == torch.bfloat16


def test_factors_and_orders_go_through() -> None:
    """Factors belong to lists that are given, and Triton walks these in any order."""
    factors = draw(1, N, H, 2).exp()
    lists = LISTS | {"slot_scale": factors}
    right = ops.selected_attention(Q, K, V, **lists)
    gate = torch.ones_like(GATE)
    found = ops.native_sparse_attention(Q, K, V, None, gate, **lists)
    torch.testing.assert_close(found, right)
    pairs = ((), (K, V), ())
    found = ops.three_branches(Q, *pairs, (None, gate, None), num_keys=N, **lists)
    torch.testing.assert_close(found, right)
    skip_unless_runs("triton", "cpu")
    call, plain = WINDOW | LISTS | {"slot_scale": None}, {"backend": "triton", "order": "tiles"}
    for run in (
        lambda **by: torch.cat(ops.selected_and_window_attention(Q, K, V, **call, **by)),
        lambda **by: ops.native_sparse_attention(Q, K, V, None, GATE, GATE, **call, **by),
    ):
        torch.testing.assert_close(run(**plain), run(backend="reference"))


# -- what only looks malformed --


def strided(x: Tensor) -> Tensor:
    """The same numbers, positions last."""
    return x.transpose(1, -1).contiguous().transpose(1, -1)


def same_everywhere(x: Tensor) -> Tensor:
    """The first position's numbers at every position, in one place."""
    return x[:, :1].expand_as(x)


def counts(*values: int) -> Tensor:
    """Counts `[1, N, H]` whose positions lie in one place."""
    return torch.tensor(values)[None, None].expand(1, N, H)


LARGEST = 2**31 - 1
CHOSEN = Operator(
    ops.native_sparse_attention,
    {**QKV, **GATES, **SIZES, **SHARED, "block_size": 4, "block_counts": 3},
)


def first_summaries(count: int, argument: str) -> Args:
    """So many summaries of `N` keys; `argument` is one that only the operator in question has."""
    few = {"k": lambda x: x[:, :count], "num_keys": N}
    return few | ({"v": lambda x: x[:, :count], **LSE} if argument == "v" else {"top_n": 3})


# a change, and the plain call that gives the same
RIGHT: dict[str, tuple[Args, Args]] = {
    "strided": ({"q": strided, "k": strided, "v": strided}, {}),
    "strides of 0": (
        {"q": same_everywhere, "k": same_everywhere},
        {"q": lambda x: same_everywhere(x).clone(), "k": lambda x: same_everywhere(x).clone()},
    ),
    "strided x": ({"k": strided, "kind": "mean"}, {}),
    "lists strided": ({"block_indices": strided, "slot_scale": strided}, {}),
    "an infinite window": ({"window_size": sys.maxsize}, {"window_size": N}),
    "a window past int64": ({"window_size": 10**30}, {"window_size": N}),
    "a block of all keys": ({"block_size": LARGEST}, {"block_size": 16}),
    "counts past the slots": (
        {"block_counts": counts(2**31, -(2**40)), "block_size": 4}, {"block_counts": counts(2, 0)},
    ),
    "counts transposed": (
        {"block_counts": counts(1, 2).transpose(1, 2).contiguous().transpose(1, 2)},
        {"block_counts": counts(1, 2).clone()},
    ),
    **{
        f"no summary, {x}": ({"length": LARGEST} | few, {"length": N + 1} | few)
        for x in ("v", "top_n")
        for few in [first_summaries(0, x)]
    },
    **{
        f"one summary, {x}": ({"stride": LARGEST} | few, {"stride": N} | few)
        for x in ("v", "top_n")
        for few in [first_summaries(1, x)]
    },
    "no window of x": ({"length": LARGEST, "kind": "mean"}, {"length": N + 1}),
    "log-sum-exp in fp64": ({"lse": draw(1, N, HQ).double()}, {"lse": draw(1, N, HQ)}),
    "log-sum-exp in bf16": (
        {"lse": draw(1, N, HQ).bfloat16()}, {"lse": draw(1, N, HQ).bfloat16().float()},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "backend", ["reference", pytest.param("triton", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize(("changes", "plain"), RIGHT.values(), ids=RIGHT.keys())
def test_the_right_result(changes: Args, plain: Args, backend: str) -> None:
    """Of every operator that has the arguments: that of the reference on a plain call."""
    skip_unless_runs(backend, "cpu")
    tried = 0
    for name, operator in (*OPERATORS.items(), ("chosen", CHOSEN)):
        if backend == "triton" and name in ("both", "three"):
            continue  # what `native` calls
        call, right = operator.changed(changes), operator.changed(plain)
        if call is None or "backend" not in call:
            continue
        found = operator.run(call | {"backend": backend})
        torch.testing.assert_close(found, operator.run(right | {"backend": "reference"}))
        tried += 1
    assert tried


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_longer_lists_than_there_are_blocks(backend: str) -> None:
    skip_unless_runs(backend, "cpu")
    call, long = OPERATORS["select"].call | {"backend": backend}, 10**6
    right = ops.select_blocks(**call | {"top_n": 3, "num_initial": 2, "num_local": 1})
    found = ops.select_blocks(**call | {"top_n": long, "num_initial": long - 1, "num_local": 1})
    assert torch.equal(found[..., :3], right) and (found[..., 3:] == -1).all()


@pytest.mark.parametrize("empty", ["B", "N", "M"])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_nothing_to_compute(empty: str, backend: str) -> None:
    """No sequences, no queries, no tokens at all: results of the right shape."""
    skip_unless_runs(backend, "cpu")

    def cut(x: object) -> object:
        is_cut = isinstance(x, Tensor) and x.ndim > 2
        return (x[:0] if empty == "B" else x[:, :0]) if is_cut else x

    kept = ("k", "v", "k_cmp", "v_cmp", "x") if empty == "N" else ()
    for name in ("selected", "window", "both", "compress", "compressed", "select", "native"):
        call = {key: x if key in kept else cut(x) for key, x in OPERATORS[name].call.items()}
        call |= {"num_keys": 0} if empty == "M" and "num_keys" in call else {}
        out = OPERATORS[name].run(call | {"backend": backend})
        right = OPERATORS[name].run(dict(OPERATORS[name].call))
        is_whole = name == "compress" and empty == "N"
        assert out.shape == (right if is_whole else cut(right)).shape


@pytest.mark.parametrize("offsets", [(), (torch.tensor([0, N]),)], ids=["none", "one"])
def test_a_pair_of_offsets(offsets: tuple[Tensor, ...]) -> None:
    """fla's, for queries and keys."""
    with pytest.raises(ValueError, match=r"cu_seqlens: got .*expected a tensor, or a pair"):
        interop.from_fla(Q, K, V, cu_seqlens=offsets)
