"""The attention function for Hugging Face's models, called as a layer calls it: judged by a query
at a time over the keys that its list shows it. Needs no `transformers`; that its models get what
they expect is test_transformers_attention.py."""

from __future__ import annotations

import itertools
import types

import pytest
import torch
from selection import assert_within_budget
from torch import Tensor

from nsa_tutorial.interop import transformers
from nsa_tutorial.runtime.order import ORDERS

pytestmark = pytest.mark.usefixtures("one_thread")

BS = 4
OFFSETS = torch.tensor([0, 4, 11], dtype=torch.int32)


class Layer(torch.nn.Module):
    """What the function reads of a layer."""

    is_causal = True
    indexer = types.SimpleNamespace(block_size=BS)


def layer_inputs(B: int = 2, N: int = 11, M: int = 11, heads: int = 2) -> list[Tensor]:
    """Queries, keys, values, lists, and for each query the first key that it may see."""
    g = torch.Generator().manual_seed(N)
    q, k, v = (torch.randn(B, h, n, 8, generator=g, dtype=torch.float64)
               for h, n in ((4, N), (2, M), (2, M)))  # fmt: skip
    ids = torch.rand(B, heads, N, -(-M // BS), generator=g).argsort(-1)
    ids = ids.masked_fill(torch.rand(ids.shape, generator=g) < 0.2, -1)
    first = torch.randint(0, M, (B, N), generator=g).sort(-1).values
    first[0, 0] = M  # padding, which sees nothing
    return [q, k, v, ids, first]


def by_loops(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, first: Tensor) -> Tensor:
    """A query at a time; 0 where it sees nothing."""
    (B, HQ, N, _), (_, H, M, _), heads = q.shape, k.shape, ids.shape[1]
    o = q.new_zeros(B, N, HQ, v.shape[3])
    for b, h, n in itertools.product(range(B), range(HQ), range(N)):
        listed = ids[b, h * heads // HQ, n].tolist()
        keys = [m for m in range(int(first[b, n]), M - N + n + 1) if m // BS in listed]
        weights = (k[b, h * H // HQ, keys] @ q[b, h, n] * 0.3).softmax(0)
        o[b, n, h] = weights @ v[b, h * H // HQ, keys]
    return o


SLOW = pytest.mark.exhaustive  # interpreted
CASES = [
    pytest.param(N, M, heads, backend,
                 marks=[SLOW] if backend == "triton" and (N, heads) != (3, 4) else [])
    for (N, M), heads, backend in itertools.product(
        [(11, 11), (3, 11), (1, 9)], [1, 2, 4], ["reference", "triton"])
]  # fmt: skip


@pytest.mark.parametrize(("N", "M", "heads", "backend"), CASES)
def test_lists_of_which_a_part_is_seen(N: int, M: int, heads: int, backend: str) -> None:
    """The output and the gradients, where blocks begin before what a query may see, and lists are
    of fewer or of more heads than keys."""
    *inputs, ids, first = layer_inputs(N=N, M=M, heads=heads)
    tolerance = {"rtol": 1e-10, "atol": 1e-10}
    if backend == "triton":
        inputs, tolerance = [x.float() for x in inputs], {"rtol": 1e-4, "atol": 1e-5}
    exact, inputs = ([x.to(dtype, copy=True).requires_grad_() for x in inputs]
                     for dtype in (torch.float64, inputs[0].dtype))  # fmt: skip
    right = by_loops(*exact, ids, first)
    assert not right[0, 0].any() and right[1, -1].any()
    found, weights = transformers.attention(
        Layer(), *inputs, first, scaling=0.3, block_indices=ids, backend=backend
    )
    assert weights is None
    torch.testing.assert_close(found.double(), right, **tolerance)
    right.square().sum().backward()
    for got, x in zip(torch.autograd.grad(found.square().sum(), inputs), exact, strict=True):
        torch.testing.assert_close(got.double(), x.grad, **tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("N", [1, 640])
@pytest.mark.parametrize("order", ["auto", *ORDERS])
def test_sizes_of_a_model_on_a_gpu(order: str, N: int) -> None:
    """In bf16, with a row that is padded by half a block: the output and the gradients."""
    M, layer = 640, types.SimpleNamespace(indexer=types.SimpleNamespace(block_size=128))
    g = torch.Generator("cuda").manual_seed(0)
    how = {"generator": g, "device": "cuda", "dtype": torch.bfloat16}
    q, k, v = (torch.randn(2, heads, n, 128, **how) for heads, n in ((64, N), (4, M), (4, M)))
    ids = torch.rand(2, 4, N, 5, generator=g, device="cuda").argsort(-1)[..., :4]
    first = torch.tensor([[70], [0]], device="cuda").expand(2, N)
    d_o = torch.randn(2, N, 64, 128, **how)
    found = {}
    for name, dtype, backend in (
        ("exact", torch.float64, "reference"), ("plain", torch.bfloat16, "reference"),
        ("ours", torch.bfloat16, "triton"),
    ):  # fmt: skip
        inputs = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        options = {"backend": backend, "order": order if name == "ours" else "auto"}
        o, _ = transformers.attention(layer, *inputs, first, block_indices=ids, **options)
        found[name] = (o, *torch.autograd.grad(o, inputs, d_o.to(o.dtype)))
    for what, got, exact, plain in zip(
        ("o", "d_q", "d_k", "d_v"), found["ours"], found["exact"], found["plain"], strict=True
    ):
        assert_within_budget(got, exact, plain, what)


def test_packed_by_offsets() -> None:
    """Each query sees the keys of its own text."""
    q, k, v, ids, _ = layer_inputs(B=1)
    first = torch.tensor([[0] * 4 + [4] * 7])
    how = {"scaling": 0.3, "block_indices": ids, "cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS}
    found, _ = transformers.attention(Layer(), q, k, v, None, **how)
    torch.testing.assert_close(found, by_loops(q, k, v, ids, first), rtol=1e-10, atol=1e-10)


ONES = {"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS}
REFUSED = {
    "dropout": ({"dropout": 0.1}, "dropout: got 0.1, expected 0"),
    "softcap": ({"softcap": 30.0}, "softcap: got 30.0.*, expected None: .* bound"),
    "sinks": ({"s_aux": torch.zeros(4)}, "s_aux: got .*, expected None: .* sinks"),
    "window": ({"sliding_window": 8}, "sliding_window: got 8.*, expected None: .* lists"),
    "weights": ({"output_attentions": True}, "output_attentions: got True.*, expected None"),
    "not causal": ({"is_causal": False}, "is_causal: got False"),
    "a mask": ({"attention_mask": torch.ones(2, 1, 11, 11)}, "attention_mask: got .*of your own"),
    "heads": ({"block_indices": torch.zeros(2, 3, 11, 1).long()}, "block_indices: got .*heads"),
    "offsets": ({"cu_seq_lens_q": OFFSETS}, "cu_seq_lens_k: got None.*, expected a tensor"),
    "other offsets": (ONES | {"cu_seq_lens_k": OFFSETS + 1}, "cu_seq_lens_k: .* those of"),
    "packed rows": (ONES, "cu_seq_lens_q: got 2 rows"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_honoured_is_named(changes: dict, message: str) -> None:
    q, k, v, ids, first = layer_inputs()
    arguments = {"query": q, "key": k, "value": v, "attention_mask": first, "block_indices": ids}
    with pytest.raises((ValueError, TypeError), match=message):
        transformers.attention(Layer(), **{**arguments, **changes})
