"""The layer is a module like any other: it copies, stores and loads, trains under autocast and
activation checkpoints, and compiles in one graph (`test_compile` has every compression)."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from places import places_of, skip_unless_runs
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nsa_tutorial import NativeSparseAttention, NativeSparseAttentionConfig

places = places_of(["tilelang", "triton"])
WIDTH = 32


class Model(nn.Module):
    """Two layers with a residual stream, as a transformer has them."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"query_heads": 4, "kv_heads": 2, "key_width": 16, "value_width": 8, "top_n": 3}
        sizes |= {"block_size": 8, "window_size": 5, "length": 4, "stride": 2, "gate_width": 16}
        config = NativeSparseAttentionConfig(WIDTH, **(sizes | options))
        self.layers = nn.ModuleList(NativeSparseAttention(config) for _ in range(2))
        self.checkpoints = False

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            if self.checkpoints:
                x = x + checkpoint(layer, x, cu_seqlens, use_reentrant=False)
            else:
                x = x + layer(x, cu_seqlens)
        return x


def draw(N: int, B: int = 1) -> Tensor:
    return torch.randn(B, N, WIDTH, generator=torch.Generator().manual_seed(N))


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


SHARED = {"separate_keys": False, "compression": "mean", "rotary_base": None}
# of other tests, too: TileLang has compiled kernels for them
COMPILED = {"value_width": 16, "block_size": 16, "window_size": 7, "length": 8, "stride": 4}


@pytest.mark.exhaustive
@places
def test_one_graph_on_each_backend(backend: str, device: str) -> None:
    skip_unless_runs(backend, device)
    layer = Model(backend=backend, **SHARED, **COMPILED).layers[0].to(device)
    torch._dynamo.reset()
    x = draw(12).to(device)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


@pytest.mark.exhaustive
def test_packed_sequences_in_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many summaries there are follows from the offsets: PyTorch asks for this switch where a
    size follows from values."""
    monkeypatch.setattr(torch._dynamo.config, "capture_dynamic_output_shape_ops", True)
    layer = Model().layers[0]
    torch._dynamo.reset()
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for ends in ((7, 24), (2, 9, 10, 24)):
        cu_seqlens = torch.tensor([0, *ends], dtype=torch.int32)
        assert torch.equal(fast(draw(24), cu_seqlens), layer(draw(24), cu_seqlens))


def test_wrong_input_raises_while_compiling() -> None:
    fast = torch.compile(Model(), fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"x: got a float32 tensor .*expected the width of the"):
        fast(torch.randn(1, 24, WIDTH + 1))


def test_copies_and_state_dicts(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, x = Model(), draw(24)
    right = model(x)
    other = Model()
    for p in other.parameters():
        nn.init.zeros_(p)
    other.load_state_dict(model.state_dict())
    stored = Model()
    for p in stored.parameters():
        nn.init.zeros_(p)
    safetensors.save_model(model, str(tmp_path / "model.safetensors"))
    safetensors.load_model(stored, str(tmp_path / "model.safetensors"))
    torch.save(model, tmp_path / "model.pt")
    pickled = torch.load(tmp_path / "model.pt", weights_only=False)
    for same in (other, stored, pickled, copy.deepcopy(model)):
        assert torch.equal(same(x), right)
    twin = copy.deepcopy(model)
    gradients(twin, twin(x).sum())
    assert all(p.grad is None for p in model.parameters()), "a copy shares nothing"


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_checkpoints_give_the_same_gradients(packed: bool) -> None:
    model, x = Model(), draw(24)
    cu_seqlens = torch.tensor([0, 7, 7, 24], dtype=torch.int32) if packed else None
    right = gradients(model, model(x, cu_seqlens).square().sum())
    model.checkpoints = True
    found = gradients(model, model(x, cu_seqlens).square().sum())
    assert all(torch.equal(found[name], right[name]) for name in right)


@pytest.mark.exhaustive
def test_checkpoints_in_a_compiled_model() -> None:
    model, x = Model(), draw(24)
    right = gradients(model, model(x).square().sum())
    model.checkpoints = True
    torch._dynamo.reset()
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = gradients(model, fast(x).square().sum())
    assert all(torch.allclose(found[name], right[name], atol=1e-5) for name in right)


def test_autocast() -> None:
    """The layer in bf16, its weights and their gradients in fp32."""
    model, x = Model(), draw(24)
    right = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert (y - right).abs().max() < 0.05 * right.abs().max()
    assert not torch.equal(y, right)
    found = gradients(model, y.float().square().sum())
    exact = gradients(model, model(x).square().sum())
    assert all(grad.dtype == torch.float32 for grad in found.values())
    error = sum((found[name] - exact[name]).square().sum() for name in exact)
    assert error < 0.05**2 * sum(grad.square().sum() for grad in exact.values())


@pytest.mark.parametrize("shape", [(0, 24), (2, 0), (0, 0), (2, 3)], ids=str)
def test_nothing_to_attend_to(shape: tuple[int, int]) -> None:
    """No sequences, no tokens, fewer tokens than a summary has."""
    model, x = Model(length=8, stride=4, learn_choice=True), torch.randn(*shape, WIDTH)
    y = model(x)
    assert y.shape == x.shape
    assert all(grad.isfinite().all() for grad in gradients(model, y.sum()).values())
    if shape[1] == 0 and shape[0]:
        assert model(x[:1], torch.tensor([0, 0])).shape == (1, 0, WIDTH)


def test_on_meta_tensors() -> None:
    """A model that is too large for this machine has a shape all the same."""
    with torch.device("meta"):
        config = NativeSparseAttentionConfig(4096, query_heads=64, kv_heads=4, key_width=192)
        layer = NativeSparseAttention(config)
        assert layer(torch.empty(1, 65_536, 4096)).shape == (1, 65_536, 4096)
        with pytest.raises(ValueError, match=r"cu_seqlens: got .* on meta, expected a device with"):
            layer(torch.empty(1, 64, 4096), torch.tensor([0, 64]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_trains_on_a_gpu(dtype: torch.dtype) -> None:
    """Compiled by PyTorch with our kernels inside: the loss falls as it does without."""

    def train(compiled: bool) -> list[float]:
        model = Model(**SHARED).cuda()
        torch._dynamo.reset()
        run = torch.compile(model, fullgraph=True) if compiled else model
        optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
        losses = []
        for step in range(8):
            x = draw(40 + 8 * step, B=2).cuda()
            with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
                loss = (run(x) - x.flip(-1)).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        return losses

    found, right = train(True), train(False)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    assert torch.allclose(torch.tensor(found), torch.tensor(right), rtol=tolerance)


@pytest.mark.gpu
def test_deterministic_on_a_gpu() -> None:
    """Twice the same gradients, to the bit, and nothing that PyTorch could not promise."""
    torch.use_deterministic_algorithms(True)
    try:
        found = []
        for _ in range(2):
            model = Model(**SHARED).cuda()
            x = draw(300, B=2).cuda()
            found.append(gradients(model, model(x).square().sum()))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
