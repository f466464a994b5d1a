"""What `torch.compile` takes for granted: outputs of operators have the strides that their fake
kernels promise, whatever those of the inputs are. And what it is for: the layer in one graph, with
every compression, one key/value head or several, forward and backward."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from places import pairwise, skip_unless_runs
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from nsa_tutorial import NativeSparseAttention, NativeSparseAttentionConfig, ops
from nsa_tutorial.runtime import strides

# -- strides --


def oddly(x: Tensor) -> Tensor:
    """The same numbers; in dimensions of one element, where strides do not count, with one that no
    new tensor has."""
    pairs = zip(x.shape, x.stride(), strict=True)
    return x.as_strided(x.shape, [7919 if n == 1 else stride for n, stride in pairs])


class AskFakes(TorchDispatchMode):
    """Every operator of this package gets odd strides, and what it returns is held against what its
    fake kernel returns for them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "nsa_tutorial":
            return func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        self.seen.add(name)
        args = tree_map_only(Tensor, oddly, args)
        found = func(*args)
        with FakeTensorMode() as mode:
            promised = func(*tree_map_only(Tensor, mode.from_tensor, args))
        for got, right in zip(tree_leaves(found), tree_leaves(promised), strict=True):
            if got is None is right:  # it only writes
                continue
            assert got.shape == right.shape and got.dtype == right.dtype, name
            assert got.stride() == right.stride(), f"{name}, an output of {tuple(got.shape)}"
        return found


# lengths and heads of one, and none at all
SMALL = {
    "one query": {"N": 1, "M": 9},
    "one head": {"N": 3, "M": 3, "HQ": 2},
    "one of each": {"N": 1, "M": 1, "HQ": 1, "D": 1, "DV": 1},
    "no query": {"N": 0, "M": 9},
}
USUAL = {"one query", "one head"}  # between the others


def call_all(
    backend: str, device: str, N: int, M: int, HQ: int = 4, D: int = 16, DV: int = 24
) -> Tensor:
    """All operators on one batch and one key/value head, added up."""
    sizes = ((N, HQ, D), (M, 1, D), (M, 1, DV))
    q, k, v = (torch.randn(1, *size, device=device, requires_grad=True) for size in sizes)
    gates = [torch.rand(1, N, HQ, device=device, requires_grad=True) for _ in range(3)]
    ids = torch.zeros(1, N, 1, 1, dtype=torch.int32, device=device)
    factors = torch.ones(ids.shape, device=device, requires_grad=True)
    length = min(8, M)
    summaries = {"length": length, "stride": length}
    lists = {"block_size": 16, "return_lse": True, "backend": backend}
    nsa = {"block_counts": 3, "block_size": 16, "window_size": 7, **summaries, "backend": backend}
    cu_seqlens = torch.tensor([0, M], dtype=torch.int32, device=device)
    k_cmp, v_cmp = (ops.compress(x, **summaries, backend=backend) for x in (k, v))
    outputs = [
        *ops.selected_attention(q, k, v, ids, **lists),
        *ops.selected_attention(q, k, v, ids, slot_scale=factors, include_own_block=True, **lists),
        *ops.selected_and_window_attention(q, k, v, ids, window_size=7, **lists),
        *ops.sliding_window_attention(q, k, v, window_size=7, return_lse=True, backend=backend),
        *ops.compressed_attention(
            q, k_cmp, v_cmp, num_keys=M, **summaries, return_lse=True, backend=backend
        ),
        ops.native_sparse_attention(q, k, v, *gates, **nsa, learn_choice=True),
        ops.native_sparse_attention(q, k, v, *gates, **nsa),
        ops.native_sparse_attention(q, k, v, g_swa=gates[0], g_cmp=gates[1], **nsa),
        ops.index_blocks(q, k[:, :, 0], backend=backend),
        torch.ops.nsa_tutorial.positions(cu_seqlens, M),
    ]
    if backend != "reference":
        outputs += torch.ops.nsa_tutorial.turned_sets([q, k], None, 1.0, 0, [1, 1], backend)
    return sum(x.nan_to_num(neginf=0).sum() for x in outputs)


# PyTorch itself is the reference
ON_KERNELS = {"mean_summaries", "gated_sum", "turned_sets", "branches_at_once"}


@pytest.mark.parametrize(
    ("shape", "backend", "device"),
    [
        pytest.param(shape, backend, device, id=f"{name}-{backend}-{device}",
                     marks=[pytest.mark.gpu] if device == "cuda"
                     else [pytest.mark.exhaustive] if backend == "triton" and name in USUAL else [])
        for name, shape in SMALL.items()
        for backend in ("reference", "triton")
        for device in ("cpu", "cuda")
    ],
)  # fmt: skip
def test_outputs_have_the_promised_strides(shape: dict, backend: str, device: str) -> None:
    """Of all operators, forward and backward: `contiguous()` would keep odd strides. (TileLang's
    functions allocate as Triton's do, and would compile every kernel anew.)"""
    skip_unless_runs(backend, device)
    with AskFakes() as asked:
        call_all(backend, device, **shape).backward()
    names = {name.removeprefix("nsa_tutorial::") for name in asked.seen}
    expected = {name.removeprefix("nsa_tutorial::") for name in OPDEFS if "nsa_tutorial" in name}
    expected -= {"first_tokens"}  # how many there are follows from values: no fake knows
    expected -= DECODING  # tests below
    if backend == "reference":
        expected -= {name for name in expected if name.removesuffix("_backward") in ON_KERNELS}
    assert names == expected


DECODING = {"decode_attention", "write_tokens", "pending_windows", "write_summaries"}
DECODING |= {"count_tokens"}  # no outputs


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_outputs_of_decoding_have_the_promised_strides(backend: str) -> None:
    """Of the operators that a layer with a cache calls."""
    skip_unless_runs(backend, "cpu")
    sizes = {"width": 16, "query_heads": 4, "kv_heads": 1, "key_width": 8, "value_width": 12}
    sizes |= {"block_size": 8, "window_size": 7, "length": 8, "stride": 4, "compression": "mean"}
    layer = NativeSparseAttention(NativeSparseAttentionConfig(**sizes, backend=backend))
    cache = layer.new_cache(1, 16)
    with torch.no_grad(), AskFakes() as asked:
        layer(torch.randn(1, 9, 16), cache=cache)
    assert {name.removeprefix("nsa_tutorial::") for name in asked.seen} >= DECODING


def test_a_new_tensor_is_not_copied() -> None:
    x = torch.randn(2, 1, 3)
    assert strides.like_new(x) is x
    assert strides.like_new(oddly(x)).stride() == x.stride()
    assert torch.equal(strides.like_new(x.mT), x.mT.contiguous())
    nothing = torch.empty(2, 0, 3)
    assert strides.like_new(nothing) is nothing


# -- the layer --

KINDS = ("mean", "weighted", "linear", "mlp")
CASES = (("aot_eager", "inductor"), KINDS, (1, 2))  # compilers, compressions, key/value heads
QUICK = {("aot_eager", "mlp", 1)}
# the capstone's compiled run is one of Inductor's with linear summaries
ELSEWHERE = {("inductor", "linear", kv_heads) for kv_heads in CASES[2]}


@pytest.fixture(scope="module")
def new_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for what Inductor compiles here: its cache does not notice when an operator gets
    another argument. The cases share PyTorch's headers in it, which take seconds."""
    return str(tmp_path_factory.mktemp("inductor"))


@pytest.mark.parametrize(
    ("compiler", "kind", "kv_heads"),
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.exhaustive)
        for case in (*QUICK, *(row for row in pairwise(*CASES) if row not in QUICK | ELSEWHERE))
    ],
)
def test_layer_in_one_graph(
    compiler: str, kind: str, kv_heads: int, new_cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and gradients; every further length is served by what the second one compiled.
    Inductor, C++ included, takes long: one length."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", new_cache)
    torch.manual_seed(0)
    sizes = {"query_heads": 4, "key_width": 16, "value_width": 8, "gate_width": 16, "top_n": 3}
    sizes |= {"block_size": 8, "window_size": 5, "length": 4, "stride": 2}
    shared = {"separate_keys": False, "rotary_base": None} if kind == "mean" else {}
    options = {"kv_heads": kv_heads, "compression": kind, **sizes, **shared}
    options["learn_choice"] = kind == "mlp"
    layer = NativeSparseAttention(NativeSparseAttentionConfig(32, **options))
    torch._dynamo.reset()
    fast = torch.compile(layer, fullgraph=True, backend=compiler)
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if compiler == "inductor" else {"atol": 0, "rtol": 0}
    for i, N in enumerate((24,) if compiler == "inductor" else (24, 41, 9)):
        x = torch.randn(2, N, 32, requires_grad=True)
        with torch.compiler.set_stance("fail_on_recompile") if i > 1 else nullcontext():
            found = fast(x)
        right = layer(x)
        tensors = [x, *layer.parameters()]
        found, right = ([y, *torch.autograd.grad(y.sum(), tensors)] for y in (found, right))
        for a, b in zip(found, right, strict=True):
            torch.testing.assert_close(a, b, **tolerance)
