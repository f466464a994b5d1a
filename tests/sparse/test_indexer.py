"""An indexer chooses by the best token of a block, and learns from the attention of the main heads,
which learn nothing from it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from branches import LargestStorage
from torch import Tensor

from nsa_tutorial import ops
from nsa_tutorial.sparse import block_selection, indexer
from nsa_tutorial.sparse.selected_attention import dense_mask, query_rows

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Case:
    """Sizes of an indexer's call; scores are small whole numbers, so that ties are exact."""

    B: int = 1
    N: int = 37
    M: int = 37
    H: int = 2
    J: int = 3
    DI: int = 8
    BS: int = 5
    weighted: bool = True
    cu: tuple[int, ...] | None = None
    whole: bool = False

    def make(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor | None]:
        g = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            x = torch.randn(shape, generator=g)
            return (x.round() if self.whole else x).to(dtype)

        w = draw(self.B, self.N, self.H * self.J)
        q_idx = draw(self.B, self.N, self.H * self.J, self.DI)
        return q_idx, draw(self.B, self.M, self.DI), w if self.weighted else None

    @property
    def offsets(self) -> Tensor | None:
        return None if self.cu is None else torch.tensor(self.cu, dtype=torch.int32)

    def sequences(self) -> list[tuple[int, int]]:
        return list(pairwise(self.cu or (0, self.M)))

    def choose(self, q_idx: Tensor, k_idx: Tensor, w: Tensor | None, **pick: int) -> Tensor:
        device = q_idx.device
        rows = query_rows(
            self.B, self.N, self.M, causal=True, cu_seqlens=self.offsets, device=device
        )
        return indexer.index_blocks(
            q_idx, k_idx, w, rows, kv_heads=self.H, block_size=self.BS, **pick
        )


CASES = {
    "nothing divides anything": Case(B=2),
    "plain products, a head a list": Case(J=1, weighted=False),
    "one list for all heads": Case(H=1, J=4, BS=16),
    "tokens": Case(H=1, BS=1),
    "more keys than queries": Case(B=2, N=9, M=90),
    "several tiles of queries": Case(N=140, M=150, H=1, J=1),
    "packed, one empty": Case(N=80, M=80, cu=(0, 7, 7, 12, 80)),
    "whole numbers: ties": Case(N=60, M=60, DI=2, BS=4, whole=True),
}
PICKS = {"own block": (4, 0, 1), "nothing forced": (3, 0, 0), "both ends": (5, 1, 2)}
# One pick for each, and all picks for one.
PAIRS = [(name, "own block") for name in CASES]
PAIRS += [("tokens", "nothing forced"), ("nothing divides anything", "nothing forced"),
          ("nothing divides anything", "both ends")]  # fmt: skip


def pick_of(name: str) -> dict[str, int]:
    return dict(zip(("top_n", "num_initial", "num_local"), PICKS[name], strict=True))


def loop(
    case: Case, q_idx: Tensor, k_idx: Tensor, w: Tensor | None, *, top_n: int, num_initial: int,
    num_local: int,
) -> list:  # fmt: skip
    """The lists `[b][n][h]`, one query and one token at a time."""
    lists = [[[[] for _ in range(case.H)] for _ in range(case.N)] for _ in range(case.B)]
    for b in range(case.B):
        for n in range(case.N):
            token = case.M - case.N + n
            start = next(i for i, j in case.sequences() if i <= token < j)
            own = (token - start) // case.BS
            for h in range(case.H):
                best = {}
                for s in range(start, token + 1):
                    score = 0.0
                    for j in range(h * case.J, h * case.J + case.J):
                        product = float(q_idx[b, n, j] @ k_idx[b, s])
                        score += product if w is None else max(product, 0) * float(w[b, n, j])
                    block = (s - start) // case.BS
                    best[block] = max(best.get(block, -torch.inf), round(score, 9))
                for block in best:
                    if block < num_initial or block > own - num_local:
                        best[block] = torch.inf
                taken = sorted(sorted(best, key=lambda i: (-best[i], i))[:top_n])
                lists[b][n][h] = taken + [-1] * (top_n - len(taken))
    return lists


@pytest.mark.parametrize(("name", "pick"), PAIRS, ids=[f"{x}-{y}" for x, y in PAIRS])
def test_the_lists_are_the_loop(name: str, pick: str) -> None:
    case = CASES[name]
    tensors = case.make()
    ids = case.choose(*tensors, **pick_of(pick))
    assert ids.dtype == torch.int32
    assert ids.tolist() == loop(case, *tensors, **pick_of(pick))
    ops.check_block_indices(ids, case.M, block_size=case.BS, cu_seqlens=case.offsets)


def test_a_needle_in_a_block_of_hay() -> None:
    """One token of block 1 matches; all of block 2 match by half: the best token decides, and so it
    does in `select_blocks`, by maxima, where the sum would take block 2."""
    k = torch.zeros(1, 16, 2)
    k[0, 5, 0], k[0, 8:12, 1] = 1.0, 1.0
    q = torch.tensor([4.0, 3.2]).expand(1, 16, 1, 2)
    case = Case(N=16, M=16, H=1, J=1, BS=4, weighted=False)
    free = {"top_n": 1, "num_initial": 0, "num_local": 0}
    assert case.choose(q, k, None, **free)[0, -1, 0, 0] == 1
    rows = query_rows(1, 16, 16, causal=True, cu_seqlens=None, device=q.device)
    options = {"M": 16, "block_size": 4, "length": 1, "stride": 1, "scale": 1.0, **free}
    for pool, block in (("sum", 2), ("max", 1)):
        ids = block_selection.select_blocks(
            q, k[:, :, None], None, rows, rows, **options, pool=pool
        )
        assert ids[0, -1, 0, 0] == block


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_compared_all_the_same(bad: float) -> None:
    """Lists have no hole and keep the own block; who does not see it notices nothing."""
    case = CASES["nothing divides anything"]
    q_idx, k_idx, w = case.make()
    pick = pick_of("own block")
    before = case.choose(q_idx, k_idx, w, **pick)
    k_idx[0, 20], q_idx[0, 33, 1] = bad, bad
    after = case.choose(q_idx, k_idx, w, **pick)
    assert torch.equal(after[0, :20], before[0, :20]) and torch.equal(after[1], before[1])
    assert torch.equal(after[0, 33, 1], case.choose(q_idx, k_idx, w, **pick)[0, 33, 1])
    assert torch.equal(after < 0, before < 0)
    ops.check_block_indices(after, case.M, block_size=case.BS)
    own = torch.arange(case.N)[:, None] // case.BS
    assert (after == own[..., None]).any(-1).all()


# -- how it learns --


def exact_loss(
    q: Tensor, k: Tensor, indexed: tuple[Tensor, Tensor, Tensor | None], mask: Tensor, kv_heads: int
) -> Tensor:
    """The divergence under a mask `[B, N, kv_heads, M]`, all at once."""
    HQ, H = q.shape[2], k.shape[2]
    s = torch.einsum("bnhd,bmhd->bnhm", q, k.repeat_interleave(HQ // H, 2)) * q.shape[-1] ** -0.5
    s = s.masked_fill(~mask.repeat_interleave(HQ // kv_heads, 2), -torch.inf)
    p = s.softmax(-1).unflatten(2, (kv_heads, -1)).mean(3).nan_to_num()
    q_idx, k_idx, w = indexed
    t = torch.einsum("bnjd,bmd->bnjm", q_idx, k_idx) * q_idx.shape[-1] ** -0.5
    t = t if w is None else t.relu() * w[..., None]
    t = t.unflatten(2, (kv_heads, -1)).sum(3).masked_fill(~mask, -torch.inf)
    log_p = torch.where(mask, t - t.logsumexp(-1, keepdim=True), 0)
    return (torch.xlogy(p, p) - p * log_p).sum() / p[..., 0].numel()


@pytest.mark.parametrize("stage", ["warm-up", "sparse"])
@pytest.mark.parametrize(
    "case",
    [
        Case(B=2, N=140, M=150, H=1, J=2),
        Case(N=80, M=80, H=2, J=1, weighted=False, cu=(0, 7, 7, 12, 80)),
    ],
    ids=["tiles", "packed"],
)
def test_the_loss_and_its_gradients(case: Case, stage: str) -> None:
    """Those of the definition; queries and keys of the main heads get none. In the sparse stage
    some lists are empty."""
    g = torch.Generator().manual_seed(1)
    q = torch.randn(case.B, case.N, 4, 6, generator=g, dtype=torch.float64, requires_grad=True)
    k = torch.randn(case.B, case.M, 2, 6, generator=g, dtype=torch.float64, requires_grad=True)
    indexed = [x if x is None else x.requires_grad_() for x in case.make()]
    ids, size = torch.zeros(case.B, case.N, case.H, 1, dtype=torch.int32), case.M  # all causal ones
    options = {"cu_seqlens": case.offsets}
    if stage == "sparse":
        ids, size = case.choose(*indexed, **pick_of("own block")), case.BS
        ids[:, 3:5] = -1
        options |= {"block_indices": ids, "block_size": size}
    loss = ops.index_loss(q, k, *indexed, kv_heads=case.H, **options)
    mask = dense_mask(ids, case.M, block_size=size, cu_seqlens=case.offsets)
    right = exact_loss(q.detach(), k.detach(), indexed, mask, case.H)
    torch.testing.assert_close(loss, right)
    leaves = [x for x in indexed if x is not None]
    found = torch.autograd.grad(loss, leaves, retain_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(right, leaves))
    assert torch.autograd.grad(loss, (q, k), allow_unused=True) == (None, None)


def test_the_loss_under_autocast() -> None:
    """That of inputs that were rounded, whose scores are fp32."""
    case = Case(B=2, N=40, M=40, H=1, J=2)
    g = torch.Generator().manual_seed(1)
    q, k = (torch.randn(2, 40, heads, 6, generator=g) for heads in (4, 1))
    indexed = case.make(torch.float32)
    indexed[0].requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = ops.index_loss(q, k, *indexed)
    loss.backward()
    q, k, q_idx, k_idx = (x.detach().bfloat16() for x in (q, k, *indexed[:2]))
    right = ops.index_loss(q, k, q_idx.requires_grad_(), k_idx, indexed[2])
    right.backward()
    assert loss.dtype == torch.float32 and loss == right
    assert torch.equal(indexed[0].grad, q_idx.grad.float())


@pytest.mark.parametrize("weighted", [True, False])
def test_an_indexer_learns_where_the_attention_goes(weighted: bool) -> None:
    """From a loss that is not near 0 to a third of it, and its lists hold more of the attention;
    what it reads gets no gradient."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, 96, 16, generator=g, requires_grad=True)
    q = (x.detach() @ torch.randn(16, 32, generator=g)).view(1, 96, 4, 8)
    k = (x.detach() @ torch.randn(16, 8, generator=g) / 4).view(1, 96, 1, 8)
    torch.manual_seed(0)
    module = indexer.Indexer(16, 4, 8, weighted=weighted)
    rows = query_rows(1, 96, 96, causal=True, cu_seqlens=None, device=x.device)
    seen = torch.ones(96, 96, dtype=torch.bool).tril()
    target = indexer.attention_target(q, k, seen, kv_heads=1, scale=8**-0.5)[0, 0]
    optimizer, losses, held = torch.optim.Adam(module.parameters(), 0.02), [], []
    for step in range(121):
        indexed = module(x)
        loss = indexer.kl_loss(q, k, *indexed, index_scale=1.0)
        if step % 120 == 0:
            pick = {"top_n": 2, "block_size": 8, "num_initial": 0, "num_local": 0}
            ids = indexer.index_blocks(*indexed, rows, kv_heads=1, **pick)
            mask = dense_mask(ids, 96, block_size=8)[0, :, 0]
            held.append(target[mask].sum() / 96)
            losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert x.grad is None
    assert losses[0] > 0.3 and losses[1] < losses[0] / 3, losses
    assert held[1] > held[0] + 0.1, held


def test_scores_of_one_tile_exist_at_a_time() -> None:
    """In choice and loss, forward and backward."""
    case = Case(N=1024, M=1024, H=1, J=1, DI=2, BS=16)
    indexed = [x.requires_grad_() for x in case.make(torch.float32)]
    q = torch.randn(1, 1024, 1, 2)
    with LargestStorage() as largest:
        case.choose(*indexed, **pick_of("own block"))
        indexer.kl_loss(q, q, *indexed).backward()
    assert largest.bytes <= 8 * 128 * 1024  # a tile of int64 columns
