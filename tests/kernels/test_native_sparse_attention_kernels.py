"""All of NSA's forward with selection and window on a kernel backend: on the CPU small, on a GPU at
lengths that matter."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from places import product, skip_unless_runs
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.runtime import checks
from nsa_tutorial.sparse.block_selection import importance, overlap_weights
from nsa_tutorial.sparse.compression import summary_rows
from nsa_tutorial.sparse.selected_attention import query_rows

pytestmark = pytest.mark.usefixtures("one_thread")


def inputs(N: int, HQ: int, H: int, D: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, N, heads, D, generator=g).to(device, dtype) for heads in (HQ, H, H))
    return q, k, v, *(torch.rand(1, N, HQ, generator=g).to(device, dtype) for _ in range(3))


GATES = {str(gates): gates for gates in ((0, 1, 2), (1, 2), (0, 1), (2,))}
FULL = torch.float32


# TileLang's kernels run where the layer's gradients are tested
SLOW = {"tilelang": []}


@product(
    "gates", GATES, ["tilelang", "triton"], {FULL: ["(0, 1, 2)", "(0, 1)"]}, dtypes=[FULL],
    slow=SLOW,
)  # fmt: skip
def test_agrees_with_the_reference(
    gates: tuple[int, ...],
    dtype: torch.dtype,
    backend: str,
    device: str,
) -> None:
    skip_unless_runs(backend, device, dtype)
    q, k, v, *all_gates = inputs(24, 4, 2, 16, dtype, device)
    used = [g if i in gates else None for i, g in enumerate(all_gates)]
    options = {"block_size": 16, "window_size": 7, "length": 8, "stride": 4, "block_counts": 3}
    if 0 not in gates and 1 in gates:
        options |= {
            "block_indices": torch.tensor([0, 1], dtype=torch.int32, device=device).expand(
                1, 24, 2, 2
            ),
            "block_counts": 2,
        }
    o = ops.native_sparse_attention(q, k, v, *used, **options, backend=backend)
    right = ops.native_sparse_attention(q, k, v, *used, **options, backend="reference")
    assert torch.allclose(o, right, atol=1e-5)


def test_one_output_for_selection_and_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both branches write to one tensor: the gated sum reads it, and nobody copies."""
    skip_unless_runs("triton", "cpu")
    from nsa_tutorial.kernels.triton.selected import forward, launch

    written = []
    for module, name in ((forward, "launch"), (launch, "window_forward")):
        run = getattr(module, name)
        noted = lambda *a, f=run, **o: written.append(o["out"][0]) or f(*a, **o)  # noqa: E731
        monkeypatch.setattr(module, name, noted)
    q, k, v, *gates = inputs(20, 2, 1, 16, torch.float32, "cpu")
    given = torch.zeros(1, 20, 1, 1, dtype=torch.int32)  # lists, so that nothing is chosen
    sizes = {"block_size": 16, "window_size": 7, "length": 8, "stride": 4, "block_counts": 1}
    ops.native_sparse_attention(q, k, v, *gates, block_indices=given, **sizes, backend="triton")
    lists, windows = written
    assert lists.untyped_storage().data_ptr() == windows.untyped_storage().data_ptr()
    assert windows.storage_offset() == lists.numel()


@pytest.mark.parametrize(
    ("device", "dtype", "chosen"),
    [
        ("cuda", torch.float16, "triton"),
        ("cuda", torch.float64, "reference"),
        ("cpu", torch.float32, "reference"),
        ("meta", torch.float32, "reference"),
    ],
)
def test_what_auto_takes(device: str, dtype: torch.dtype, chosen: str) -> None:
    """On CUDA tensors, which need not exist for the choice."""
    q = SimpleNamespace(device=torch.device(device), dtype=dtype)
    assert checks.choose_backend("auto", q) == chosen


def worst_exchange(ids: Tensor, exact: Tensor, score: Tensor) -> float:
    """Over all rows, how much more the blocks that `ids` misses are worth than those it has in
    their place, relative to them."""

    def chosen(lists: Tensor) -> Tensor:
        ones = torch.zeros(
            *score.shape[:-1], score.shape[-1] + 1, dtype=torch.bool, device=score.device
        )
        return ones.scatter_(-1, torch.where(lists < 0, score.shape[-1], lists).long(), True)[
            ..., :-1
        ]

    has, right = chosen(ids), chosen(exact)
    missed = score.masked_fill(~(right & ~has), -torch.inf).amax(-1)
    instead = score.masked_fill(~(has & ~right), torch.inf).amin(-1)
    differs = missed.isfinite()
    return ((missed - instead) / missed)[differs].max().item() if differs.any() else 0.0


@pytest.mark.parametrize(
    ("N", "device"),
    [
        pytest.param(300, "cpu", id="cpu"),
        pytest.param(2048, "cuda", id="cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "rounding"),
    [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)],
    ids=["float32", "bfloat16"],
)
def test_only_rounding_changes_the_choice(
    N: int, device: str, dtype: torch.dtype, rounding: float
) -> None:
    """Where the list is not that of fp64, the blocks that changed places are worth the same but for
    rounding."""
    length, stride, BS = 32, 16, 64
    q, k, *_ = inputs(N, 16, 1, 64, dtype, device)
    choose = {"top_n": 16 if N > 1024 else 4, "block_size": BS, "num_keys": N}
    ids = ops.select_blocks(q, ops.compress(k), **choose)
    q, k_cmp = q.double(), ops.compress(k.double())
    exact = ops.select_blocks(q, k_cmp, **choose)
    rows = query_rows(1, N, N, causal=True, cu_seqlens=None, device=q.device)
    overlap = overlap_weights(length, stride, BS, -(-N // BS), q.device)
    summaries = summary_rows(rows, N, length=length, stride=stride, cu_seqlens=None)
    score = importance(q, k_cmp, summaries, overlap=overlap, scale=64**-0.5)
    assert worst_exchange(ids, exact, score) < rounding
    other = exact.roll(1, dims=1)  # the lists of other queries are no rounding
    assert worst_exchange(other, exact, score) > rounding


@pytest.mark.gpu
def test_auto_on_the_gpu() -> None:
    """Its outputs are Triton's, and its gradients are there."""
    q, k, v, *_ = inputs(300, 16, 1, 64, torch.float16, "cuda")
    q.requires_grad_()
    o, triton, reference = (
        ops.sliding_window_attention(q, k, v, window_size=64, backend=backend)
        for backend in ("auto", "triton", "reference")
    )
    assert torch.equal(o, triton) and not torch.equal(o, reference)
    (found,), (right,) = (torch.autograd.grad(x.sum(), q) for x in (o, reference))
    assert torch.allclose(found, right, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_end_to_end_at_2048(dtype: torch.dtype) -> None:
    """Choice included: where the lists are those of fp64, so is the output."""
    q, k, v, *gates = inputs(2048, 16, 1, 64, dtype, "cuda")
    choose = {"top_n": 16, "block_size": 64, "num_keys": 2048}
    k_cmp = ops.compress(k)
    ids = ops.select_blocks(q, k_cmp, **choose)
    exact = ops.select_blocks(q.double(), ops.compress(k.double()), **choose)
    differs = (ids != exact).any(-1)
    assert differs.float().mean() < (0.01 if dtype == torch.float32 else 0.2)

    o = ops.native_sparse_attention(q, k, v, *gates)
    assert torch.equal(o, ops.native_sparse_attention(q, k, v, *gates, backend="triton"))
    reference = ops.native_sparse_attention(q, k, v, *gates, backend="reference")
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert torch.allclose(o.float(), reference.float(), atol=tolerance)
    truth = ops.native_sparse_attention(*(x.double() for x in (q, k, v, *gates)))
    same = ~differs[0, :, 0]
    assert torch.allclose(o[:, same].double(), truth[:, same], atol=tolerance)


@pytest.mark.gpu
def test_65_536_tokens_fit() -> None:
    """Nothing of N x N / stride is stored: that alone would take 64 GiB per 64 heads in fp32."""
    q, k, v, *gates = inputs(65_536, 64, 4, 128, torch.bfloat16, "cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o = ops.native_sparse_attention(q, k, v, *gates)
    assert o.shape == q.shape
    assert o.isfinite().all()
    assert torch.cuda.max_memory_allocated() - before < 16 * 2**30
