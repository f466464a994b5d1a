"""Random selected-attention problems, and the judgement of an answer against fp64 under the
contract's error budget."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.runtime.order import ORDERS
from nsa_tutorial.sparse.selected_attention import dense_mask, masked_attention


@dataclass(frozen=True)
class Problem:
    """Sizes and options of one call; `make` draws its tensors from `seed`.

    Lists hold distinct ids, among them -1, ids of the future and ids past the last block, in any
    order. With `factors` each slot has one: mostly positive, some 0 or below, and NaN where the
    slot shows nothing.
    """

    B: int = 1
    N: int = 20
    M: int = 20
    H: int = 2
    G: int = 3
    D: int = 24
    DV: int = 40
    S: int = 4
    BS: int = 16
    counts: int | str | None = None
    own: bool = False
    causal: bool = True
    cu: tuple[int, ...] | None = None
    scale: float | None = None
    factors: bool = False
    magnitude: float = 1.0
    index_dtype: torch.dtype = torch.int32
    seed: int = 0

    def make(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Call:
        g = torch.Generator().manual_seed(self.seed)
        q = (torch.randn(self.B, self.N, self.H * self.G, self.D, generator=g) * self.magnitude).to(
            dtype
        )
        k = torch.randn(self.B, self.M, self.H, self.D, generator=g).to(dtype)
        v = torch.randn(self.B, self.M, self.H, self.DV, generator=g).to(dtype)
        pool = max(-(-self.M // self.BS) + 2, self.S)  # two ids past the last block
        order = torch.rand(self.B, self.N, self.H, pool, generator=g).argsort(-1)[..., : self.S]
        ids = order.masked_fill(torch.rand(order.shape, generator=g) < 0.15, -1).to(
            self.index_dtype
        )
        counts = self.counts
        if counts == "random":
            counts = torch.randint(
                0, self.S + 1, (self.B, self.N, self.H), generator=g, dtype=torch.int32
            )
        cu = None if self.cu is None else torch.tensor(self.cu, dtype=torch.int32)
        options = {
            "block_size": self.BS,
            "block_counts": counts,
            "include_own_block": self.own,
            "scale": self.scale,
            "causal": self.causal,
            "cu_seqlens": cu,
        }
        call = Call(q, k, v, ids, options)
        if self.factors:
            drawn = 1 + torch.randn(ids.shape, generator=g) / 2
            drawn[torch.rand(ids.shape, generator=g) < 0.1] = 0
            shows_nothing = ~torch.stack([call.mask_of(s).any(-1) for s in range(self.S)], -1)
            # numbers that every dtype holds
            factors = drawn.bfloat16().float().masked_fill(shows_nothing, math.nan)
            call = call.having(slot_scale=factors)
        return call.to(device)


@dataclass(frozen=True)
class Call:
    """The arguments of one call of `ops.selected_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    ids: Tensor
    options: dict

    def to(self, device: str) -> Call:
        options = {
            name: x.to(device) if isinstance(x, Tensor) else x for name, x in self.options.items()
        }
        return Call(*(x.to(device) for x in (self.q, self.k, self.v, self.ids)), options)

    def having(self, **changes: object) -> Call:
        """The same call with other tensors (`q=`, `k=`, `v=`, `ids=`) or options."""
        tensors = {name: changes.pop(name) for name in ("q", "k", "v", "ids") if name in changes}
        return replace(self, **tensors, options={**self.options, **changes})

    def run(self, backend: str) -> tuple[Tensor, Tensor]:
        """On a backend, or on Triton in one of its orders."""
        by = {"backend": backend}
        if backend in ORDERS:
            by = {"backend": "triton", "order": backend}
        return ops.selected_attention(
            self.q, self.k, self.v, self.ids, **self.options, return_lse=True, **by
        )

    def mask(self) -> Tensor:
        left_out = ("scale", "slot_scale")
        options = {name: x for name, x in self.options.items() if name not in left_out}
        return dense_mask(self.ids, self.k.shape[1], **options)

    def mask_of(self, slot: int) -> Tensor:
        """What one slot shows, without the own block."""
        others = torch.arange(self.ids.shape[-1], device=self.ids.device) != slot
        return self.having(ids=self.ids.masked_fill(others, -1), include_own_block=False).mask()

    def factors(self) -> Tensor | None:
        """The factor of each key in each row, `[B, N, H, M]`: that of the slot that shows it, 1 for
        the own block that was added. Differentiable in `slot_scale`."""
        slot_scale = self.options.get("slot_scale")
        if slot_scale is None:
            return None
        S = self.ids.shape[-1]
        slot_of_key = torch.full(self.mask().shape, S, device=self.ids.device)
        for slot in range(S):
            slot_of_key[self.mask_of(slot)] = slot
        return torch.cat([slot_scale, torch.ones_like(slot_scale[..., :1])], -1).gather(
            -1, slot_of_key
        )

    def truth(self) -> tuple[Tensor, Tensor]:
        """The answer in fp64, from the dense mask."""
        return self.dense(torch.float64)

    def plain(self) -> tuple[Tensor, Tensor]:
        """What plain PyTorch gives in the call's own dtype."""
        return self.dense(self.q.dtype)

    def dense(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        q, k, v = (x.to(dtype) for x in (self.q, self.k, self.v))
        factors, scale = self.factors(), self.options["scale"]
        if factors is None:
            return masked_attention(q, k, v, self.mask(), scale)
        return scaled_attention(q, k, v, self.mask(), factors.to(dtype), scale)


def scaled_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, factors: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`masked_attention`, with factors `[B, N, H, M]` on the scaled scores; a row that sees nothing
    has gradients of 0."""
    G = q.shape[2] // k.shape[2]
    k, v, mask = (t.repeat_interleave(G, dim=2) for t in (k, v, mask))
    s = torch.einsum("bnhd,bmhd->bnhm", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if factors is not None:
        s = s * factors.repeat_interleave(G, dim=2)
    sees = mask.any(-1, keepdim=True)
    s = s.masked_fill(~mask, -math.inf).masked_fill(~sees, 0)
    p = torch.softmax(s, -1).masked_fill(~mask, 0)
    lse = torch.logsumexp(s, -1).masked_fill(~sees[..., 0], -math.inf)
    return torch.einsum("bnhm,bmhd->bnhd", p, v), lse


def assert_within_budget(got: Tensor, truth: Tensor, plain: Tensor, what: str) -> None:
    """The error against fp64 is at most twice that of plain PyTorch in the same dtype, plus 1e-6;
    non-finite places agree."""
    assert got.shape == truth.shape, (
        f"{what}: shape {list(got.shape)}, expected {list(truth.shape)}"
    )
    assert not got.isnan().any(), f"{what}: NaN"
    finite = truth.isfinite()
    assert torch.equal(got[~finite].double(), truth[~finite]), (
        f"{what}: differs where the truth is not finite"
    )
    error = (got.double() - truth)[finite].abs().max().item() if finite.any() else 0.0
    budget = (
        2 * ((plain.double() - truth)[finite].abs().max().item() if finite.any() else 0.0) + 1e-6
    )
    assert error <= budget, f"{what}: error {error:.2e} over the budget of {budget:.2e}"


def assert_right(call: Call, backend: str) -> tuple[Tensor, Tensor]:
    """Run `call` on `backend` and judge output and log-sum-exp; returns them."""
    o, lse = call.run(backend)
    (o_true, lse_true), (o_plain, lse_plain) = call.truth(), call.plain()
    assert o.dtype == call.v.dtype
    assert lse.dtype == torch.float32
    assert_within_budget(o, o_true, o_plain, f"{backend} o")
    assert_within_budget(lse, lse_true, lse_plain, f"{backend} lse")
    return o, lse
