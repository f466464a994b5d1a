"""What comes from another library computes here what it computed there: judged in fp64 by loops
written from its conventions."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from selection import assert_within_budget
from torch import Tensor

from nsa_tutorial import interop, ops

pytestmark = pytest.mark.usefixtures("one_thread")

BS = 5
Keys = Callable[[int, int, int], list[int]]


def tensors(
    B: int = 2,
    N: int = 23,
    M: int | None = None,
    H: int = 2,
    G: int = 3,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    """q, k, v and three gates, positions first."""
    g = torch.Generator().manual_seed(N)
    M = N if M is None else M
    shapes = [(B, N, H * G, 8), (B, M, H, 8), (B, M, H, 4), *[(B, N, H * G)] * 3]
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]


def lists(
    N: int = 23, M: int | None = None, heads: int = 2, S: int = 4, B: int = 2, seed: int = 0
) -> Tensor:
    """Distinct ids in any order, with -1 and blocks of the future among them."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(B, N, heads, max(-(-(M or N) // BS), S), generator=g).argsort(-1)[..., :S]
    return ids.masked_fill(torch.rand(ids.shape, generator=g) < 0.2, -1)


def attend(
    q: Tensor, k: Tensor, v: Tensor, keys: Keys, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax over the keys `keys(b, n, i)` of query head `i`, a row at a time; a key listed twice
    counts twice."""
    (B, N, HQ, D), G = q.shape, q.shape[2] // k.shape[2]
    o, lse = q.new_zeros(B, N, HQ, v.shape[3]), q.new_full((B, N, HQ), -math.inf)
    for b, n, i in product(range(B), range(N), range(HQ)):
        seen = keys(b, n, i)
        if seen:
            scores = k[b, seen, i // G] @ q[b, n, i] * (D**-0.5 if scale is None else scale)
            o[b, n, i], lse[b, n, i] = scores.softmax(0) @ v[b, seen, i // G], scores.logsumexp(0)
    return o, lse


def causal_blocks(ids: Tensor, G: int, offset: int = 0, counts: Tensor | None = None) -> Keys:
    """fla's and ejKernel's reading of a list: a slot whose block begins by the query's position, up
    to that position."""

    def keys(b: int, n: int, i: int) -> list[int]:
        row, t = ids[b, n, i // G].tolist(), offset + n
        read = row if counts is None else row[: int(counts[b, n, i // G])]
        return [
            p for j in read if 0 <= j * BS <= t for p in range(j * BS, min((j + 1) * BS, t + 1))
        ]

    return keys


def choose(
    q: Tensor, k_cmp: Tensor, count: int, always: Callable[[int], set[int]], offset: int = 0
) -> Tensor:
    """Blocks by the softmax mass of complete ones, summed over the group, 1 a head for
    `always(own)`; ties go to the later."""
    (B, N, HQ, D), H = q.shape, k_cmp.shape[2]
    ids = torch.full((B, N, H, count), -1)
    for b, n, h in product(range(B), range(N), range(H)):
        t = offset + n
        heads, complete = slice(h * HQ // H, (h + 1) * HQ // H), (t + 1) // BS
        mass = (q[b, n, heads] @ k_cmp[b, :complete, h].T * D**-0.5).softmax(-1).sum(0).tolist() + [
            0.0
        ] * (t // BS + 1 - complete)
        mass = [HQ / H if j in always(t // BS) else m for j, m in enumerate(mass)]
        best = sorted(range(len(mass)), key=lambda j: (-mass[j], -j))[:count]
        ids[b, n, h, : len(best)] = torch.tensor(best)
    return ids


def means(x: Tensor) -> Tensor:
    """One mean for each block `[B, NB, H, D]`, the last one of what there is."""
    return torch.stack([block.mean(1) for block in x.split(BS, dim=1)], dim=1)


def three_branches(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: list[Tensor | None],
    selected: Keys,
    window: int = 0,
    scale: float | None = None,
) -> Tensor:
    """fla's sum: a selection without gate counts whole, summaries are complete blocks, a window of
    w shows w keys."""
    g_cmp, g_slc, g_swa = gates
    offset = k.shape[1] - q.shape[1]
    o, _ = attend(q, k, v, selected, scale)
    o = o if g_slc is None else g_slc[..., None] * o
    if g_cmp is not None:
        o = (
            o
            + g_cmp[..., None]
            * attend(
                q, means(k), means(v), lambda b, n, i: [*range((offset + n + 1) // BS)], scale
            )[0]
        )
    if window:
        last = attend(
            q,
            k,
            v,
            lambda b, n, i: [*range(max(offset + n - window + 1, 0), offset + n + 1)],
            scale,
        )[0]
        o = o + g_swa[..., None] * last
    return o


def near(got: Tensor, right: Tensor) -> bool:
    return got.shape == right.shape and torch.allclose(got, right, atol=1e-10)


# -- the tables --


@pytest.mark.parametrize(
    ("table", "convert"),
    [
        (interop.FLA, interop.from_fla),
        (interop.LUCIDRAINS, interop.from_lucidrains),
        (interop.EJKERNEL, interop.from_ejkernel),
    ],
    ids=["fla", "lucidrains", "ejkernel"],
)
def test_a_table_names_every_argument(table: dict[str, str], convert: Callable) -> None:
    """In the order of the function, and one line more."""
    assert [*table] == [*inspect.signature(convert).parameters, "a row that sees no key"]


def test_heads_first_is_its_own_inverse() -> None:
    x = torch.arange(210).reshape(2, 3, 5, 7)
    assert interop.heads_first(x)[1, 4, 2].tolist() == x[1, 2, 4].tolist()
    assert torch.equal(interop.heads_first(interop.heads_first(x)), x)


# -- fla --


@pytest.mark.parametrize("M", [23, 31], ids=["training", "more keys than queries"])
@pytest.mark.parametrize("gated", [True, False], ids=["gates", "no gate"])
def test_fla_with_lists(M: int, gated: bool) -> None:
    """An int is not read: every slot is."""
    q, k, v, *gates = tensors(M=M)
    gates = gates if gated else [None] * 3
    window = 7 if gated else 0
    ids = lists(M=M)
    right = three_branches(q, k, v, gates, causal_blocks(ids, 3, M - 23), window, 0.3)
    arguments = interop.from_fla(q, k, v, *gates, ids, 1, BS, window, 0.3)
    assert near(ops.native_sparse_attention(**arguments), right)


def test_fla_counts_of_each_row() -> None:
    q, k, v, *_ = tensors()
    ids, counts = (
        lists(),
        torch.randint(0, 5, (2, 23, 2), generator=torch.Generator().manual_seed(4)),
    )
    arguments = interop.from_fla(q, k, v, block_indices=ids, block_counts=counts, block_size=BS)
    assert near(
        ops.native_sparse_attention(**arguments),
        attend(q, k, v, causal_blocks(ids, 3, counts=counts))[0],
    )


@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize("M", [23, 31], ids=["training", "more keys than queries"])
def test_fla_choosing_blocks(M: int, count: int) -> None:
    q, k, v, *gates = tensors(M=M)
    ids = choose(q, means(k), count, lambda own: {0, own - 1, own}, M - 23)
    right = three_branches(q, k, v, gates, causal_blocks(ids, 3, M - 23), 6)
    arguments = interop.from_fla(q, k, v, *gates, block_counts=count, block_size=BS, window_size=6)
    assert near(ops.native_sparse_attention(**arguments), right)


def test_fla_choosing_as_many_blocks_as_each_row_counts() -> None:
    """The forced ones first, then by importance: the first so many of the list that the largest
    count chooses."""
    q, k, v, *gates = tensors()
    counts = torch.randint(3, 6, (2, 23, 2), generator=torch.Generator().manual_seed(4))
    lists = [choose(q, means(k), count, lambda own: {0, own - 1, own}, 0) for count in (3, 4, 5)]
    width = max(x.shape[-1] for x in lists)
    padded = [F.pad(x, (0, width - x.shape[-1]), value=-1) for x in lists]
    ids = torch.stack(padded).gather(0, (counts - 3)[None, ..., None].expand(1, -1, -1, -1, width))[
        0
    ]
    right = three_branches(q, k, v, gates, causal_blocks(ids, 3), 6)
    arguments = interop.from_fla(q, k, v, *gates, block_counts=counts, block_size=BS, window_size=6)
    assert near(ops.native_sparse_attention(**arguments), right)


def test_fla_lists_win_over_the_choice() -> None:
    q, k, v, g_cmp, g_slc, _ = tensors()
    ids = lists()
    right = three_branches(q, k, v, [g_cmp, g_slc, None], causal_blocks(ids, 3))
    assert near(
        ops.native_sparse_attention(**interop.from_fla(q, k, v, g_cmp, g_slc, None, ids, 2, BS)),
        right,
    )


def test_fla_without_a_window_has_no_window_gate() -> None:
    q, k, v, _, g_slc, g_swa = tensors()
    arguments = interop.from_fla(q, k, v, None, g_slc, g_swa.fill_(torch.nan), lists(), 4, BS)
    assert arguments["g_swa"] is None
    assert ops.native_sparse_attention(**arguments).isfinite().all()


def test_fla_heads_first() -> None:
    q, k, v, *gates = tensors()
    ids, counts = (
        lists(),
        torch.randint(0, 5, (2, 23, 2), generator=torch.Generator().manual_seed(5)),
    )
    right = ops.native_sparse_attention(**interop.from_fla(q, k, v, *gates, ids, counts, BS, 7))
    theirs = [x.transpose(1, 2).contiguous() for x in (q, k, v, *gates, ids, counts)]
    assert near(
        ops.native_sparse_attention(**interop.from_fla(*theirs, BS, 7, head_first=True)), right
    )


def test_fla_packed() -> None:
    q, k, v, *gates = tensors(B=1)
    ids = lists(B=1)
    cu = torch.tensor([0, 9, 9, 23], dtype=torch.int32)
    parts = [three_branches(*(x[:, a:b] for x in (q, k, v)), [g[:, a:b] for g in gates],
    causal_blocks(ids[:, a:b], 3), 4)
             for a, b in ((0, 9), (9, 23))]  # fmt: skip
    for offsets in (cu, (cu, cu.clone())):
        arguments = interop.from_fla(q, k, v, *gates, ids, 4, BS, 4, cu_seqlens=offsets)
        assert near(ops.native_sparse_attention(**arguments), torch.cat(parts, dim=1))


def test_the_selection_of_a_whole() -> None:
    q, k, v, *gates = tensors()
    ids, counts = (
        lists(),
        torch.randint(0, 5, (2, 23, 2), generator=torch.Generator().manual_seed(6)),
    )
    arguments = interop.selection_only(interop.from_fla(q, k, v, *gates, ids, counts, BS, 7, 0.4))
    o, lse = ops.selected_attention(**arguments, return_lse=True)
    o_right, lse_right = attend(q, k, v, causal_blocks(ids, 3, counts=counts), 0.4)
    assert near(o, o_right)
    assert near(lse, lse_right)


# -- lucidrains --


def before_the_query(own: bool, heads: int = 2) -> tuple[Tensor, Tensor]:
    """Lists and a mask heads first, as their kernels want them, with ids of anything under the
    mask."""
    ids = lists(heads=heads, seed=7).transpose(1, 2).contiguous()  # [B, H, N, S]
    t = torch.arange(23)[:, None]
    mask = (ids >= 0) & (ids < (t if own else t + 1) // BS)
    return torch.where(mask, ids, 99), mask


def lucidrains_keys(ids: Tensor, mask: Tensor, own: bool) -> Keys:
    """Selected blocks whole, without a causal mask; the own block up to the query."""

    def keys(b: int, n: int, i: int) -> list[int]:
        h = i * ids.shape[1] // 6
        chosen = ids[b, h, n][mask[b, h, n]].tolist()
        return [p for j in chosen for p in range(j * BS, (j + 1) * BS)] + (
            [*range(n // BS * BS, n + 1)] if own else []
        )

    return keys


@pytest.mark.parametrize("own", [True, False], ids=["own block", "no own block"])
@pytest.mark.parametrize("heads", [2, 6], ids=["lists per group", "lists per query head"])
def test_lucidrains(heads: int, own: bool) -> None:
    q, k, v, *_ = (x.requires_grad_() for x in tensors())
    ids, mask = before_the_query(own, heads)
    right = attend(q, k, v, lucidrains_keys(ids, mask, own))
    theirs = [x.transpose(1, 2) for x in (q, k, v)]
    arguments = interop.from_lucidrains(*theirs, BS, ids, mask, None, own, return_lse=True)
    o, lse = ops.selected_attention(**arguments)
    assert near(o, right[0])
    assert near(lse, right[1])
    gradients, right_gradients = (
        torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (o, right[0])
    )
    assert all(near(a, b) for a, b in zip(gradients, right_gradients, strict=True))


def test_lucidrains_all_masked() -> None:
    q, k, v, *_ = (x.transpose(1, 2) for x in tensors()[:3])
    ids, mask = before_the_query(False)
    o, lse = ops.selected_attention(
        **interop.from_lucidrains(
            q, k, v, BS, ids, mask & False, include_block_causal=False, return_lse=True
        )
    )
    assert not o.any()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize(
    ("own", "n", "block", "expected"),
    [
        pytest.param(True, 12, 2, "0 … 1", id="the own block, which is added too"),
        pytest.param(True, 14, 2, "0 … 1", id="the own block at its last query"),
        pytest.param(False, 13, 2, "0 … 1", id="the own block, of which a part is the future"),
        pytest.param(True, 12, 3, "0 … 1", id="a future block"),
        pytest.param(False, 22, 4, "0 … 3", id="the ragged last block"),
        pytest.param(True, 12, 40, "0 … 1", id="past the end"),
        pytest.param(True, 12, -1, "0 … 1", id="no block at all"),
    ],
)
def test_lucidrains_blocks_without_a_causal_mask(
    own: bool, n: int, block: int, expected: str
) -> None:
    q, k, v = (x.transpose(1, 2) for x in tensors()[:3])
    ids, mask = before_the_query(own)
    ids[1, 0, n, 2], mask[1, 0, n, 2] = block, True
    with pytest.raises(
        ValueError,
        match=rf"selected_block_indices: got block {block} in row \[1, {n}, 0\], expected "
        rf"{expected}",
    ):
        interop.from_lucidrains(q, k, v, BS, ids, mask, include_block_causal=own)
    mask[1, 0, n, 2] = False
    interop.from_lucidrains(q, k, v, BS, ids, mask, include_block_causal=own)


def test_lucidrains_own_block_at_its_last_query() -> None:
    """Without the added own block, it has nothing of the future there, and means the same."""
    q, k, v, *_ = tensors()
    ids, mask = before_the_query(False)
    ids[1, 0, 14], mask[1, 0, 14] = (
        torch.tensor([2, 0, 9, 9]),
        torch.tensor([True, True, False, False]),
    )
    o = ops.selected_attention(
        **interop.from_lucidrains(
            *(x.transpose(1, 2) for x in (q, k, v)), BS, ids, mask, include_block_causal=False
        )
    )
    assert near(o, attend(q, k, v, lucidrains_keys(ids, mask, False))[0])


def test_lucidrains_window_is_one_key_wider() -> None:
    q, k, v, *_ = tensors()
    right, _ = attend(q, k, v, lambda b, n, i: [p for p in range(n + 1) if n - p <= BS])
    assert near(ops.sliding_window_attention(q, k, v, window_size=BS + 1), right)


@pytest.mark.parametrize("window", [False, True], ids=["lists", "list and window"])
@pytest.mark.parametrize("own", [True, False], ids=["own block", "no own block"])
@pytest.mark.parametrize("heads", [2, 6], ids=["lists per group", "lists per query head"])
def test_lucidrains_gradient_of_the_selection(heads: int, own: bool, window: bool) -> None:
    """As their backward sums it up, a block at a time, in `kv_block_grads`; straight through, with
    ones."""
    q, k, v, *_ = tensors()
    ids, mask = before_the_query(own, heads)
    scores = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
    arguments = interop.from_lucidrains(
        *(x.transpose(1, 2) for x in (q, k, v)), BS, ids, mask,
        1 + scores - scores.detach(), own, return_lse=True, return_sliding_window_out=window,
    )  # fmt: skip
    attends = ops.selected_and_window_attention if window else ops.selected_attention
    o, lse, *_ = attends(**arguments)
    d_o = torch.randn(o.shape, generator=torch.Generator().manual_seed(2), dtype=o.dtype)
    (found,) = torch.autograd.grad((o * d_o).sum(), scores)

    delta, softmax_scale = (d_o * o).sum(-1), q.shape[-1] ** -0.5
    kv_block_grads = torch.zeros(ids.shape, dtype=q.dtype)
    for b, n, i, slot in product(range(2), range(23), range(6), range(ids.shape[-1])):
        h, kv = i * heads // 6, i // 3
        if mask[b, h, n, slot]:
            keys = slice(int(ids[b, h, n, slot]) * BS, (int(ids[b, h, n, slot]) + 1) * BS)
            qk = k[b, keys, kv] @ q[b, n, i]
            p = torch.exp(qk * softmax_scale - lse[b, n, i])
            ds = p * (v[b, keys, kv] @ d_o[b, n, i] - delta[b, n, i]) * softmax_scale
            kv_block_grads[b, h, n, slot] += (ds * qk).sum()
    assert (kv_block_grads != 0).any()
    torch.testing.assert_close(found, kv_block_grads.float())


@pytest.mark.parametrize("heads", [2, 6], ids=["lists per group", "lists per query head"])
def test_lucidrains_with_the_window_as_a_second_output(heads: int) -> None:
    """Both outputs and both log-sum-exps, from the arguments of one call."""
    q, k, v, *_ = tensors()
    ids, mask = before_the_query(True, heads)
    arguments = interop.from_lucidrains(
        *(x.transpose(1, 2) for x in (q, k, v)),
        BS,
        ids,
        mask,
        return_lse=True,
        return_sliding_window_out=True,
    )
    o, lse, o_window, lse_window = ops.selected_and_window_attention(**arguments)
    for found, right in (
        ((o, lse), attend(q, k, v, lucidrains_keys(ids, mask, True))),
        (
            (o_window, lse_window),
            attend(q, k, v, lambda b, n, i: [p for p in range(n + 1) if n - p <= BS]),
        ),
    ):
        assert near(found[0], right[0])
        assert near(found[1], right[1])


# -- ejkernel --


@pytest.mark.parametrize("gated", [True, False], ids=["gate", "no gate"])
def test_ejkernel_with_lists(gated: bool) -> None:
    """An int, also one that is no power of two, is the number of slots read."""
    q, k, v, _, g_slc, _ = tensors()
    g_slc = g_slc if gated else None
    ids = lists()
    right = three_branches(q, k, v, [None, g_slc, None], causal_blocks(ids[..., :3], 3), scale=0.3)
    arguments = interop.from_ejkernel(q, k, v, None, g_slc, ids, 3, BS, 0.3)
    assert near(ops.native_sparse_attention(**arguments), right)


def test_ejkernel_lists_of_query_blocks() -> None:
    q, k, v, *_ = tensors()
    ids = lists(N=5, M=23).transpose(1, 2)  # [B, H, NB, S]
    counts = torch.randint(0, 5, (2, 2, 5), generator=torch.Generator().manual_seed(8))
    of_query = torch.arange(23) // BS
    keys = causal_blocks(
        ids[:, :, of_query].transpose(1, 2), 3, counts=counts[:, :, of_query].transpose(1, 2)
    )
    arguments = interop.from_ejkernel(
        q, k, v, block_indices=ids, block_counts=counts, block_size=BS
    )
    assert near(ops.native_sparse_attention(**arguments), attend(q, k, v, keys)[0])


def test_ejkernel_lists_of_either_kind() -> None:
    """Two queries, two heads, two blocks: lists are taken for those of queries, as there."""
    q, k, v, *_ = tensors(N=2)
    ids = torch.tensor([[[[0], [0]], [[-1], [1]]]]).expand(2, -1, -1, -1)
    o = ops.native_sparse_attention(
        **interop.from_ejkernel(q, k, v, block_indices=ids, block_counts=1, block_size=1)
    )
    assert near(o, attend(q, k, v, lambda b, n, i: [0] if n == 0 else [1] if i >= 3 else [])[0])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_ejkernel_choosing_blocks(count: int) -> None:
    """With `g_cmp`, lists that are given are not read; only the own block is always chosen."""
    q, k, v, g_cmp, g_slc, _ = tensors()
    ids = choose(q, means(k), count, lambda own: {own})
    right = three_branches(q, k, v, [g_cmp, g_slc, None], causal_blocks(ids, 3))
    arguments = interop.from_ejkernel(q, k, v, g_cmp, g_slc, lists(), count, BS)
    assert near(ops.native_sparse_attention(**arguments), right)


def test_ejkernel_packed() -> None:
    q, k, v, g_cmp, g_slc, _ = tensors(B=1)
    cu = torch.tensor([0, 9, 23], dtype=torch.int32)
    token_indices = torch.tensor([[s, p] for s, n in enumerate((9, 14)) for p in range(n)])
    arguments = interop.from_ejkernel(
        q, k, v, g_cmp, g_slc, None, 2, BS, cu_seqlens=cu, token_indices=token_indices
    )
    o = ops.native_sparse_attention(**arguments)
    for a, b in ((0, 9), (9, 23)):
        part = interop.from_ejkernel(*(x[:, a:b] for x in (q, k, v, g_cmp, g_slc)), None, 2, BS)
        assert near(o[:, a:b], ops.native_sparse_attention(**part))


def test_minus_one_is_empty_and_wraps_nowhere() -> None:
    """The last block, where -1 would wrap round to, holds NaN."""
    q, k, v, *_ = tensors(N=25)
    ids = torch.full((2, 25, 2, 2), -1)
    ids[..., 0] = 0
    for x in (k, v):
        x[:, 20:] = torch.nan
    o = ops.native_sparse_attention(
        **interop.from_ejkernel(q, k, v, block_indices=ids, block_counts=2, block_size=BS)
    )
    assert o.isfinite().all()


# -- errors --

Q, K, V, *GATES = tensors(N=11)
IDS = lists(N=11)
FQ, FK, FV = (x.transpose(1, 2) for x in (Q, K, V))
FIDS = torch.zeros(2, 2, 11, 4, dtype=torch.long)
NONE = torch.zeros(2, 2, 11, 4, dtype=torch.bool)
CU = torch.tensor([0, 4, 11])

WRONG = {
    "selection: no list": (
        lambda: interop.selection_only(interop.from_fla(Q, K, V, *GATES)),
        ValueError,
        r"block_indices: got None \(NoneType\), expected \[B, N, H, S\]",
    ),
    "fla: no window gate": (
        lambda: interop.from_fla(Q, K, V, block_indices=IDS, window_size=3),
        ValueError,
        r"g_swa: got None .*expected a gate \[B, N, HQ\] for the window of 3",
    ),
    "fla: negative window": (
        lambda: interop.from_fla(Q, K, V, window_size=-1),
        ValueError,
        "window_size: got -1, expected",
    ),
    "fla: no counts": (
        lambda: interop.from_fla(Q, K, V, *GATES, block_counts=None),
        TypeError,
        "block_counts: got None",
    ),
    "fla: two offsets": (
        lambda: interop.from_fla(Q, K, V, block_indices=IDS, cu_seqlens=(CU, CU[:2])),
        ValueError,
        r"cu_seqlens: got \[\[0, 4, 11\], \[0, 4\]\] .*expected the same offsets",
    ),
    "fla: half a pair": (
        lambda: interop.from_fla(Q, K, V, block_indices=IDS, cu_seqlens=(CU, None)),
        TypeError,
        r"cu_seqlens: got None .*expected a tensor of shape \[num_sequences \+ 1\]",
    ),
    "fla: gates of rank 4": (
        lambda: ops.native_sparse_attention(**interop.from_fla(FQ, FK, FV, Q, head_first=True)),
        ValueError,
        r"g_cmp: got .*expected .*\[B, N, HQ\]",
    ),
    "fla: q": (lambda: interop.from_fla(None, K, V), TypeError, "q: got None"),
    "lucidrains: q": (
        lambda: interop.from_lucidrains([], FK, FV, 5, FIDS, NONE),
        TypeError,
        r"fq: got \[\] \(list\)",
    ),
    "lucidrains: float mask": (
        lambda: interop.from_lucidrains(FQ, FK, FV, 5, FIDS, NONE.float()),
        TypeError,
        "fmask: got a float32 tensor .*expected bool",
    ),
    "lucidrains: mask of another shape": (
        lambda: interop.from_lucidrains(FQ, FK, FV, 5, FIDS, NONE[..., :2]),
        ValueError,
        r"fmask: got .*expected the shape of selected_block_indices, \[2, 2, 11, 4\]",
    ),
    "lucidrains: three heads": (
        lambda: interop.from_lucidrains(FQ, FK, FV, 5, FIDS[:, [0, 1, 1]], NONE[:, [0, 1, 1]]),
        ValueError,
        r"selected_block_indices: got .*\[2, 3, 11, 4\].*expected .*\[2, 2, 11\], or 6 heads",
    ),
    "lucidrains: fewer queries than keys": (
        lambda: interop.from_lucidrains(FQ[:, :, 1:], FK, FV, 5, FIDS[:, :, 1:], NONE[:, :, 1:]),
        ValueError,
        "fq: got .* expected as many queries as keys, 11",
    ),
    "lucidrains: block_size": (
        lambda: interop.from_lucidrains(FQ, FK, FV, 0, FIDS, NONE),
        ValueError,
        "block_size: got 0",
    ),
    "lucidrains: sel_scale of another shape": (
        lambda: interop.from_lucidrains(FQ, FK, FV, 5, FIDS, NONE, torch.ones(2, 11, 2, 4)),
        ValueError,
        r"sel_scale: got .*expected the shape of selected_block_indices, \[2, 2, 11, 4\]",
    ),
    "lucidrains: sel_scale of integers": (
        lambda: interop.from_lucidrains(FQ, FK, FV, 5, FIDS, NONE, FIDS),
        TypeError,
        "sel_scale: got a int64 tensor .*expected float32",
    ),
    "ejkernel: fewer queries than keys": (
        lambda: interop.from_ejkernel(Q[:, 1:], K, V),
        ValueError,
        "query: got .* expected as many queries as keys, 11",
    ),
    "ejkernel: counts for a choice": (
        lambda: interop.from_ejkernel(Q, K, V, GATES[0], block_counts=IDS[..., 0]),
        ValueError,
        "block_counts: got a int64 tensor .*expected an int",
    ),
    "ejkernel: tokens of nothing": (
        lambda: interop.from_ejkernel(Q, K, V, block_indices=IDS, token_indices=CU),
        ValueError,
        "token_indices: got .* expected None without cu_seqlens",
    ),
    "ejkernel: no list": (
        lambda: ops.native_sparse_attention(**interop.from_ejkernel(Q, K, V)),
        ValueError,
        "block_indices: got None, expected",
    ),
    "ejkernel: lists of another shape": (
        lambda: ops.native_sparse_attention(
            **interop.from_ejkernel(Q, K, V, block_indices=IDS[:, :5])
        ),
        ValueError,
        r"block_indices: got .*\[2, 5, 2, 4\].*\[2, 11, 2\]",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_errors(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


# -- on a GPU --


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("heads", [2, 6], ids=["lists per group", "lists per query head"])
def test_triton(heads: int, dtype: torch.dtype) -> None:
    q, k, v, *_ = (x.transpose(1, 2).cuda() for x in tensors(dtype=dtype)[:3])
    ids, mask = (x.cuda() for x in before_the_query(True, heads))
    arguments = interop.from_lucidrains(q, k, v, BS, ids, mask)
    wide = interop.from_lucidrains(q.double(), k.double(), v.double(), BS, ids, mask)
    truth, plain = (ops.selected_attention(**a, backend="reference") for a in (wide, arguments))
    assert_within_budget(ops.selected_attention(**arguments, backend="triton"), truth, plain, "o")
