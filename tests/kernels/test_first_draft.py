"""The published design: each of its mistakes shows on its smallest input, and mended it is
right."""

from __future__ import annotations

import pytest
import torch
from places import places_of, product, skip_unless_runs
from selection import assert_within_budget
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.runtime import environment

if environment.detect().tilelang is None:
    pytest.skip("tilelang is not installed", allow_module_level=True)

from nsa_tutorial.kernels import tilelang_first_draft as draft
from nsa_tutorial.sparse.selected_attention import dense_mask, masked_attention

places = places_of(["tilelang"])
NAMES = list(draft.MISTAKES)


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
    ids = torch.tensor([-1, -1] if name == "normalise" else [0, 1], dtype=torch.int32).reshape(
        1, 1, 1, 2
    )
    return tuple(x.to(device) for x in (q, k, v, ids)), {
        "block_size": 16,
        "causal": False,
        "scale": 1.0,
    }


@places
@pytest.mark.parametrize("name", NAMES)
def test_each_mistake_shows(name: str, backend: str, device: str) -> None:
    """With the other three mended, the mistake alone spoils its smallest input; mended, the input
    comes out right."""
    skip_unless_runs(backend, device)
    (q, k, v, ids), options = inputs(name, device)
    expected = ops.selected_attention(q, k, v, ids, backend="reference", **options)
    mended = draft.run(q.half(), k.half(), v.half(), ids, **options, **draft.MENDED)
    torch.testing.assert_close(mended.float(), expected, rtol=2e-3, atol=2e-3)
    wrong = draft.run(
        q.half(), k.half(), v.half(), ids, **options, **{**draft.MENDED, name: draft.MISTAKES[name]}
    )
    if name in ("update_max", "normalise"):
        assert wrong.isnan().all()
    else:
        assert ((wrong.float() - expected).abs() > 0.01).all()


@places
def test_all_mistakes_hide_on_comfortable_input(backend: str, device: str) -> None:
    """Causal, whole blocks, no empty row, the default scale, scores of order one: that is why
    nobody noticed."""
    skip_unless_runs(backend, device)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 32, n, 16, generator=g).to(device).half() for n in (16, 1, 1))
    ids = torch.tensor([0, 1], dtype=torch.int32, device=device).expand(1, 32, 1, 2)
    expected = ops.selected_attention(
        q.float(), k.float(), v.float(), ids, block_size=16, backend="reference"
    )
    torch.testing.assert_close(
        draft.run(q, k, v, ids, block_size=16).float(), expected, rtol=5e-3, atol=5e-3
    )


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
    ids = ids.masked_fill(torch.rand(ids.shape, generator=g) < 0.2, -1).masked_fill(
        ids >= blocks, -1
    )
    ids[:, 5] = -1
    ids = ids.to(device)
    o = draft.run(q, k, v, ids, block_size=BS, causal=causal, scale=scale, **draft.MENDED)
    mask = dense_mask(ids.cpu(), N, block_size=BS, causal=causal).to(device)
    truth = masked_attention(q.double(), k.double(), v.double(), mask, scale)[0]
    plain = masked_attention(q, k, v, mask, scale)[0]
    assert_within_budget(o, truth, plain, "first draft, mended")


def test_widths_past_one_tile_are_refused() -> None:
    with pytest.raises(AssertionError, match="D: got 192, expected at most 128"):
        draft.build_kernel(1, 16, 16, 192, 16, 2)
