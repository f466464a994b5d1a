"""The published design: each mistake shows on its smallest input, and mended it is right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from places import places_of, product, skip_unless_runs
from selection import assert_within_budget
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.runtime import environment

if environment.detect().tilelang is None:
    pytest.skip("tilelang is not installed", allow_module_level=True)

from nsa_tutorial.bench.variants import tilelang_first_draft as draft
from nsa_tutorial.sparse.selected_attention import dense_mask, masked_attention

places = places_of(["tilelang"])
NAMES = list(draft.MISTAKES)
ON_THE_CPU = ["update_max", "normalise"]  # chapter 10 runs all of them


def inputs(name: str, device: str) -> tuple[tuple[Tensor, ...], dict]:
    """The smallest input on which the mistake shows, in tiles that a GPU takes: 16 heads, width 16,
    blocks of 16."""
    M = 24 if name == "is_seen" else 32
    score = torch.zeros(M)
    if name == "update_max":
        score[:16] = 100.0  # the second block lies 100 nats lower
    if name == "is_seen":
        score -= 2.0
    if name == "fold_scale":
        score[0] = 1.0
    q, k = torch.zeros(1, 1, 16, 16), torch.zeros(1, M, 1, 16)
    q[..., 0], k[0, :, 0, 0] = 1.0, score
    v = torch.arange(1.0, M * 16 + 1).reshape(1, M, 1, 16) / (M * 16)
    slots = [-1, -1] if name == "normalise" else [0, 1]
    ids = torch.tensor(slots, dtype=torch.int32).reshape(1, 1, 1, 2)
    options = {"block_size": 16, "causal": False, "scale": 1.0}
    return tuple(x.to(device) for x in (q, k, v, ids)), options


@pytest.mark.exhaustive
@places
@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[] if x in ON_THE_CPU else pytest.mark.exhaustive) for x in NAMES],
)
def test_each_mistake_shows(name: str, backend: str, device: str) -> None:
    """With the other three mended, the mistake alone spoils its smallest input; mended, the input
    comes out right."""
    skip_unless_runs(backend, device)
    (q, k, v, ids), options = inputs(name, device)
    expected = ops.selected_attention(q, k, v, ids, backend="reference", **options)
    half = (q.half(), k.half(), v.half(), ids)
    mended = draft.run(*half, **options, **draft.MENDED)
    torch.testing.assert_close(mended.float(), expected, rtol=2e-3, atol=2e-3)
    pieces = {**draft.MENDED, name: draft.MISTAKES[name]}
    wrong = draft.run(*half, **options, **pieces)
    if name in ("update_max", "normalise"):
        assert wrong.isnan().all()
    else:
        assert ((wrong.float() - expected).abs() > 0.01).all()


@pytest.mark.exhaustive
@places
def test_all_mistakes_hide_on_comfortable_input(backend: str, device: str) -> None:
    """Causal, whole blocks, no empty row, the default scale, scores of order one: that is why
    nobody noticed."""
    skip_unless_runs(backend, device)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 32, n, 16, generator=g).to(device).half() for n in (16, 1, 1))
    ids = torch.tensor([0, 1], dtype=torch.int32, device=device).expand(1, 32, 1, 2)
    exact = (q.float(), k.float(), v.float(), ids)
    expected = ops.selected_attention(*exact, block_size=16, backend="reference")
    found = draft.run(q, k, v, ids, block_size=16).float()
    torch.testing.assert_close(found, expected, rtol=5e-3, atol=5e-3)


CASES = {  # B, N, H, G, D, BS, S, causal, scale: each its own kernel
    "ragged": (1, 37, 1, 16, 32, 16, 3, True, None),
    "two-sequences-two-heads-a-scale": (2, 40, 2, 16, 64, 32, 2, True, 0.3),
    "not-causal-ragged-group-of-32": (1, 45, 2, 32, 16, 16, 4, False, None),
}
HALF = torch.float16


@product("case", CASES, ["tilelang"], {HALF: ["not-causal-ragged-group-of-32"]}, dtypes=[HALF])
def test_mended_is_right(case: tuple, dtype: torch.dtype, backend: str, device: str) -> None:
    """Within the contract's error budget, with empty slots, blocks of the future and a row without
    any block."""
    skip_unless_runs(backend, device, dtype)
    B, N, H, G, D, BS, S, causal, scale = case
    g = torch.Generator().manual_seed(N)
    q, k, v = (torch.randn(B, N, n, D, generator=g).half().to(device) for n in (H * G, H, H))
    blocks = -(-N // BS)
    ids = torch.rand(B, N, H, max(blocks, S), generator=g).argsort(-1)[..., :S].to(torch.int32)
    empty = torch.rand(ids.shape, generator=g) < 0.2
    ids = ids.masked_fill(empty | (ids >= blocks), -1)
    ids[:, 5] = -1
    ids = ids.to(device)
    o = draft.run(q, k, v, ids, block_size=BS, causal=causal, scale=scale, **draft.MENDED)
    mask = dense_mask(ids.cpu(), N, block_size=BS, causal=causal).to(device)
    truth = masked_attention(q.double(), k.double(), v.double(), mask, scale)[0]
    plain = masked_attention(q, k, v, mask, scale)[0]
    assert_within_budget(o, truth, plain, "first draft, mended")


@pytest.mark.gpu
def test_autotune_takes_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As chapter 10 shows it: threads and stages, timed."""
    import tilelang
    from tilelang.autotuner import set_autotune_inputs

    monkeypatch.chdir(tmp_path)  # it writes autotuner.log where it runs
    configs = [{"threads": t, "num_stages": s} for t in (32, 64) for s in (1, 2)]

    @tilelang.autotune(configs=configs)
    @tilelang.jit(target="cuda", pass_configs=draft.PASS_CONFIGS)
    def tuned(heads, groups, D, BS, S, threads=32, num_stages=1):
        options = {"threads": threads, "num_stages": num_stages, **draft.MENDED}
        return draft.build_kernel(1, heads, groups, D, BS, S, **options)

    q, k, v = (torch.randn(1, 256, n, 64, device="cuda").half() for n in (32, 2, 2))
    ids = torch.randint(4, (1, 256, 2, 4), dtype=torch.int32, device="cuda")
    o = torch.empty_like(q)
    with set_autotune_inputs(q, k, v, ids, o):
        best = tuned(32, 16, 64, 64, 4)
    assert best.config in configs
    assert best.latency > 0
    best(q, k, v, ids, o)
    expected = draft.run(q, k, v, ids, block_size=64, **draft.MENDED)
    torch.testing.assert_close(o, expected, rtol=2e-3, atol=2e-3)


def test_widths_past_one_tile_are_refused() -> None:
    with pytest.raises(AssertionError, match="D: got 192, expected at most 128"):
        draft.build_kernel(1, 16, 16, 192, 16, 2)
