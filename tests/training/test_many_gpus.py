"""A text over several ranks is the text on one: outputs, log-sum-exps, lists and gradients."""

from __future__ import annotations

import random

import many_gpus_cases as cases
import pytest
import torch
from ranks import Ranks

from nsa_tutorial.training.many_gpus.cuts import KINDS, Cut

EXACT = 1e-12
DOCUMENTS = [None, (0, 2, 30, 31, 45), (0, 3, 3, 30, 31, 45), (0, 22, 45), (0, 1, 45)]


def assert_small(found: list[dict[str, float]], limit: float = EXACT) -> None:
    """On each rank, the error of each tensor."""
    for errors in found:
        assert errors and all(error <= limit for error in errors.values()), errors


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [48, 45, 3])
@pytest.mark.parametrize("own_window", [False, True], ids=["shared", "own"])
def test_branches(two: Ranks, kind: str, tokens: int, own_window: bool) -> None:
    assert_small(two.run(cases.branches, Cut(2, tokens, kind), own_window, {"batch": 2}))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("documents", DOCUMENTS[1:], ids=str)
def test_packed(two: Ranks, kind: str, documents: tuple[int, ...]) -> None:
    for own_window in (False, True):
        assert_small(two.run(cases.branches, Cut(2, 45, kind, documents), own_window))


def test_four(four: Ranks) -> None:
    """Windows and summaries that reach over several ranks; ranks without a summary, or a token."""
    for tokens in (45, 9, 1):
        for kind in KINDS:
            assert_small(four.run(cases.branches, Cut(4, tokens, kind), True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(40))
def test_any_cut(two: Ranks, four: Ranks, seed: int) -> None:
    """Any length, documents and sizes."""
    r = random.Random(seed)
    ranks, size = r.choice([(two, 2), (four, 4)])
    for _ in range(5):
        tokens = r.choice([0, 1, 2, 3, 5, 7, r.randint(1, 80)])
        ends = sorted(r.randint(0, tokens) for _ in range(r.randint(0, 6)))
        documents = r.choice([None, (0, *ends, tokens)])
        changes = {
            "length": r.randint(1, 12), "stride": r.randint(1, 6), "kv_heads": r.choice([1, 2, 4]),
            "window_size": r.choice([1, 2, 7, 30, 200]), "block_size": r.choice([2, 4, 5, 16]),
            "batch": 1 if documents else r.choice([1, 2]),
        }  # fmt: skip
        cut = Cut(size, tokens, r.choice(KINDS), documents)
        assert_small(ranks.run(cases.branches, cut, r.random() < 0.5, changes))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("documents", DOCUMENTS[:2], ids=str)
def test_each_branch(two: Ranks, kind: str, documents: tuple[int, ...] | None) -> None:
    """Outputs, log-sum-exps, lists with ties, and gradients through all of them."""
    found = two.run(cases.one_by_one, Cut(2, 45, kind, documents), 1)
    assert [errors["lists"] for errors in found] == [0, 0]
    assert_small(found)


@pytest.mark.parametrize(
    "what",
    ["lists", "factors", "counts of lists", "counts", "learn_choice", "no summaries",
     "the window alone", "summaries alone"],
)  # fmt: skip
def test_lists_and_gates(two: Ranks, what: str) -> None:
    assert_small(two.run(cases.lists, Cut(2, 45), what))


def test_kernels(two: Ranks) -> None:
    """Triton's, interpreted."""
    found = two.run(cases.branches, Cut(2, 9), False, {"key_width": 16, "value_width": 16},
                    "triton")  # fmt: skip
    assert_small(found, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("documents", DOCUMENTS[:2], ids=str)
def test_bytes(two: Ranks, kind: str, documents: tuple[int, ...] | None) -> None:
    """What is counted by hand is what is sent."""
    for own_window in (False, True):
        for found in two.run(cases.bytes_sent, Cut(2, 45, kind, documents), own_window):
            by_hand, forward, by_hand_back, backward = found
            assert by_hand == forward and by_hand_back == backward
            assert sum(forward.values()) > 0


def test_a_head_travels_while_its_neighbour_is_computed(two: Ranks) -> None:
    """Two heads, of two pieces each. Summaries travel before keys and values."""
    for log in two.run(cases.order):
        forward = ["start"] * 4 + ["finish"] * 2 + ["compute"] * 2
        forward += ["finish"] * 2 + ["compute"] * 2
        back = ["compute back"] * 2 + ["start_back"] * 2
        assert log == forward + back + back + ["finish_back"] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_shard_and_unshard(two: Ranks, kind: str) -> None:
    for tokens in (0, 1, 9):
        assert two.run(cases.round_trip, Cut(2, tokens, kind)) == [(True, True)] * 2


# -- the layer --


CUTS = [Cut(2, 21), Cut(2, 2), Cut(2, 21, "contiguous", (0, 3, 15, 21))]


@pytest.mark.parametrize(
    ("compression", "shards"), [("mean", False), ("mlp", True)], ids=["plain", "fully_shard"]
)
def test_layer(two: Ranks, compression: str, shards: bool) -> None:
    """Outputs, and the gradient of every weight."""
    for cut in CUTS:
        assert_small(two.run(cases.layer, 1, cut, compression, shards=shards))


@pytest.mark.parametrize(
    "shards",
    [False, pytest.param(True, marks=pytest.mark.exhaustive)],
    ids=["plain", "fully_shard"],
)
def test_layer_over_data_and_context(four: Ranks, shards: bool) -> None:
    assert_small(four.run(cases.layer, 2, Cut(2, 21), "mlp", shards=shards))


def test_layer_under_a_checkpoint(two: Ranks) -> None:
    """What is computed again travels again."""
    assert_small(two.run(cases.layer, 1, Cut(2, 21), "mlp", shards=False, recomputes=True))


def test_layer_that_learns_to_choose(two: Ranks) -> None:
    assert_small(two.run(cases.layer, 1, Cut(2, 21), "linear", shards=False, learns=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("shards", [False, True], ids=["plain", "fully_shard"])
def test_layer_compiled(two: Ranks, shards: bool) -> None:
    """`torch.compile` leaves the operators over ranks as they are, and compiles what is around."""
    assert_small(two.run(cases.layer, 1, Cut(2, 21), "mlp", shards=shards, compiles=True))


# -- cuts, without processes --


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 45])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_shards_make_the_whole(kind: str, tokens: int, ranks: int) -> None:
    cut, x = Cut(ranks, tokens, kind), torch.arange(2 * tokens).view(2, tokens)
    shares = [cut.shard(x, rank) for rank in range(ranks)]
    assert torch.equal(cut.unshard(shares), x)
    for rank, part in enumerate(shares):
        assert part.shape[1] == cut.length(rank)
        assert torch.equal(cut.positions(rank), part[0])


def test_positions_begin_anew_with_each_document() -> None:
    cut = Cut(2, 12, "zigzag", (0, 4, 4, 11, 12))
    whole = cut.unshard([cut.positions(rank)[None] for rank in range(2)])
    assert whole.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 0]]


def test_a_zigzag_costs_every_rank_the_same() -> None:
    """Pairs of a query and a key before it: of the contiguous cut, the last rank has most."""

    def pairs(kind: str) -> list[int]:
        cut = Cut(4, 64, kind)
        return [
            sum(
                a * (b - a) + (b - a) ** 2 // 2
                for a, b in (cut.spans[piece] for piece in cut.pieces(rank))
            )
            for rank in range(4)
        ]

    assert pairs("contiguous") == [128, 384, 640, 896]
    assert pairs("zigzag") == [512] * 4
