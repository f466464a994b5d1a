"""Costs of the sparse branches: counted by hand on small shapes, by loops over every query on
others."""

import pytest
import torch

from nsa_tutorial import ops
from nsa_tutorial.course import costs
from nsa_tutorial.course.costs import Cost
from nsa_tutorial.sparse import query_tiles
from nsa_tutorial.sparse.compression import num_summaries
from nsa_tutorial.sparse.selected_attention import block_list, query_rows

SHAPES = [(1, 1), (9, 9), (40, 40), (3, 40), (1, 37), (64, 101)]


def seen_by_loop(N, M, sees):
    return sum(sees(t, key) for t in range(M - N, M) for key in range(t + 1))


@pytest.mark.parametrize(("N", "M"), SHAPES, ids=str)
@pytest.mark.parametrize(
    ("block_size", "top_n"), [(1, 1), (4, 1), (4, 3), (8, 2), (5, 100)], ids=str
)
def test_selected_keys_are_those_of_a_full_list(N, M, block_size, top_n):
    def sees(
        t, key
    ):  # the own block and the first others: which past blocks are listed does not matter
        own = t // block_size
        return key // block_size in {own, *range(min(top_n - 1, own))}

    assert costs.selected_keys(N, M, block_size=block_size, top_n=top_n) == seen_by_loop(N, M, sees)


@pytest.mark.parametrize(("N", "M"), SHAPES, ids=str)
@pytest.mark.parametrize("window_size", [1, 2, 7, 500])
def test_window_keys_are_exactly_the_last_w(N, M, window_size):
    assert costs.window_keys(N, M, window_size=window_size) == seen_by_loop(
        N, M, lambda t, key: key > t - window_size
    )


@pytest.mark.parametrize(("N", "M"), SHAPES, ids=str)
@pytest.mark.parametrize(
    ("length", "stride"), [(1, 1), (4, 2), (8, 4), (6, 6), (3, 5), (64, 16), (200, 8)], ids=str
)
def test_summaries_are_seen_once_they_end(N, M, length, stride):
    ends = [first + length - 1 for first in range(0, M - length + 1, stride)]
    by_loop = sum(end <= t for t in range(M - N, M) for end in ends)
    assert costs.summary_keys(N, M, length=length, stride=stride) == by_loop


def test_one_program_per_query_by_hand():
    # B=2 texts, N=3 queries, HQ=4 heads over H=2, D=5, DV=7; 6 keys per text and KV head; 2 bytes
    # each.
    cost = costs.one_program_per_query(6, 3, 5, 7, B=2, HQ=4, H=2)
    assert cost.flops == 2 * (2 * 4 * 6) * 12  # every query head computes
    # but the group of 2 loads once
    assert cost.bytes_read == 2 * (2 * 3 * 4 * 5) + 2 * (2 * 2 * 6) * 12
    assert cost.bytes_written == 2 * (2 * 3 * 4 * 7) + 4 * (2 * 3 * 4)


def test_selected_attention_by_hand():
    # 4 tokens, blocks of 2, one block per query, its own: 1 + 2 + 1 + 2 keys; one id of 4 bytes per
    # query.
    assert costs.selected_attention(4, 4, 8, block_size=2, top_n=1) == Cost(
        2 * 6 * 16, 2 * (4 * 8 + 6 * 16) + 4 * 4, 2 * 4 * 8 + 4 * 4
    )


def test_sliding_window_attention_by_hand():
    # windows of 3 over 4 tokens: 1 + 2 + 3 + 3 keys.
    assert costs.sliding_window_attention(4, 4, 8, window_size=3) == Cost(
        2 * 9 * 16, 2 * (32 + 9 * 16), 2 * 32 + 16
    )


def test_compressed_attention_by_hand():
    # summaries of tokens 0-2 and 2-4, for 6 queries: 0 + 0 + 1 + 1 + 2 + 2.
    assert costs.compressed_attention(6, 6, 8, length=3, stride=2) == Cost(
        2 * 6 * 16, 2 * (48 + 6 * 16), 2 * 48 + 24
    )


def test_native_sparse_attention_by_hand():
    # M=4 tokens, HQ=2 over H=1, D=2, DV=3; blocks of 2, one listed; window 3; summaries of 2 every
    # 2: 0 + 1 + 1 + 2 seen, 2 in all.
    cost = costs.native_sparse_attention(
        4, 4, 2, 3, block_size=2, top_n=1, window_size=3, length=2, stride=2, HQ=2, H=1
    )
    branch_keys, q, o, rows = 4 + 6 + 9, 4 * 2 * 2, 4 * 2 * 3, 4 * 2
    # the branches; the summaries' scores again
    assert cost.flops == 2 * 2 * branch_keys * 5 + 2 * 2 * 4 * 2
    summaries_in, branches_in, choice_in = 4 * 5, 3 * q + branch_keys * 5, q + 4 * 2
    # lse; list
    assert (
        cost.bytes_read
        == 2 * (summaries_in + branches_in + choice_in + 3 * o + 3 * rows) + 4 * rows + 4 * 4
    )
    assert cost.bytes_written == 2 * (2 * 5 + 3 * o + o) + 4 * 3 * rows + 4 * 4


def test_a_group_shares_its_loads_but_not_its_arithmetic():
    options = {"block_size": 16, "top_n": 4, "H": 2}
    small, large = (costs.selected_attention(256, 256, 64, HQ=HQ, **options) for HQ in (2, 32))
    assert large.flops == 16 * small.flops
    assert large.bytes < 2 * small.bytes


@pytest.mark.parametrize(
    "branch",
    [
        lambda: costs.selected_attention(100, 100, 16, block_size=8, top_n=13),
        lambda: costs.sliding_window_attention(100, 100, 16, window_size=100),
        lambda: costs.compressed_attention(100, 100, 16, length=1, stride=1),
    ],
    ids=["all blocks listed", "window over everything", "a summary per token"],
)
def test_a_branch_that_sees_everything_computes_the_causal_triangle(branch):
    assert branch().flops == 2 * costs.visible_pairs(100, 100) * 32


def test_decoding_costs_what_the_last_query_costs():
    options = {"block_size": 8, "top_n": 3, "window_size": 20, "length": 8, "stride": 4}
    for branch, names in (
        (costs.selected_attention, ("block_size", "top_n")),
        (costs.sliding_window_attention, ("window_size",)),
        (costs.compressed_attention, ("length", "stride")),
    ):
        chosen = {name: options[name] for name in names}
        one, all_, all_but_one = (
            branch(N, M, 16, **chosen) for N, M in ((1, 77), (77, 77), (76, 76))
        )
        assert costs.total(one, all_but_one) == all_


def test_the_usual_figure_recomputed():
    # 16.8 million scores at 4096 tokens. 16 blocks of 64 leave 21 % of the square, 43 % of its
    # causal half: 1024 keys are a sixteenth of 16 384 tokens, not of 4096. About a sixteenth at any
    # length is what summaries every 16 tokens leave.
    N = 4096
    assert costs.visible_pairs(N, N, causal=False) == 16_777_216
    selected = costs.selected_keys(N, N, block_size=64, top_n=16)
    assert selected == 1024 * 1025 // 2 + 48 * (64 * 960 + 64 * 65 // 2) == 3_573_760
    assert selected / N**2 == pytest.approx(0.213, abs=5e-4)
    assert selected / costs.visible_pairs(N, N) == pytest.approx(0.426, abs=5e-4)
    assert costs.selected_keys(1, 16_384, block_size=64, top_n=16) == 16_384 // 16
    assert costs.summary_keys(N, N, length=32, stride=16) / costs.visible_pairs(
        N, N
    ) == pytest.approx(1 / 16, rel=0.02)


# -- against what the code does --

BRANCHES = {
    "selected": lambda q, k, N: ops.selected_attention(
        q, k, k, full_lists(N, 4, 3), block_size=4, return_lse=True, backend="reference"
    ),
    "selected, fast": lambda q, k, N: selected_under_a_mask(q, k, full_lists(N, 4, 3), 4),
    "window": lambda q, k, N: ops.sliding_window_attention(
        q, k, k, window_size=5, return_lse=True, backend="reference"
    ),
    "compressed": lambda q, k, N: ops.compressed_attention(
        q, k, k, length=5, stride=3, num_keys=N, return_lse=True, backend="reference"
    ),
}


def full_lists(N: int, block_size: int, top_n: int) -> torch.Tensor:
    """The own block and the first others, `[1, N, 1, top_n]`, -1 where there are fewer."""
    lists = torch.full((1, N, 1, top_n), -1, dtype=torch.int32)
    for t in range(N):
        own = t // block_size
        ids = sorted({own, *range(min(top_n - 1, own))})
        lists[0, t, 0, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    return lists


def selected_under_a_mask(q, k, lists, block_size):
    rows = query_rows(1, q.shape[1], k.shape[1], causal=True, cu_seqlens=None, device=q.device)
    ids = block_list(lists, rows, block_size=block_size, block_counts=None, include_own_block=False)
    return query_tiles.selected_attention(q, k, k, ids, rows, block_size=block_size, scale=1.0)


@pytest.mark.parametrize("N", [1, 5, 30, 41])
@pytest.mark.parametrize("branch", BRANCHES)
def test_keys_counted_are_keys_that_the_reference_reads(branch, N):
    """A key is read by a query if the query's log-sum-exp depends on it: the non-zero rows of the
    Jacobian are counted."""
    generator = torch.Generator().manual_seed(N)
    J = num_summaries(N, 5, 3) if branch == "compressed" else N
    q, k = (torch.randn(1, n, 1, 4, generator=generator, dtype=torch.float64) for n in (N, J))
    jacobian = torch.autograd.functional.jacobian(
        lambda keys: BRANCHES[branch](q, keys, N)[1][0, :, 0].nan_to_num(neginf=0.0), k
    )
    counted = {
        "window": costs.window_keys(N, N, window_size=5),
        "compressed": costs.summary_keys(N, N, length=5, stride=3),
    }.get(branch, costs.selected_keys(N, N, block_size=4, top_n=3))
    assert int((jacobian[:, 0, :, 0] != 0).any(-1).sum()) == counted  # [N, J, D]
