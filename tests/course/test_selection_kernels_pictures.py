"""Chapter 14's pictures: bytes by counting tensors, lists and halvings against the operators, and
what the pictures say."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from nsa_tutorial import ops
from nsa_tutorial.course import heads
from nsa_tutorial.course.exercises.selection_kernels import pick
from nsa_tutorial.course.kernels import running_top_n
from nsa_tutorial.course.widgets import selection_kernels as pictures

pytestmark = pytest.mark.usefixtures("one_thread")

DRAWN = ("ways", "running", "network", "skips", "halving")


@pytest.fixture(scope="module")
def lists() -> torch.Tensor:
    """The operators' lists of 8 blocks, of the stored heads: `[512, 4, 8]`."""
    h = heads.load()
    k_cmp = ops.compress(h.k, **pictures.SIZES)
    sizes = {"block_size": pictures.BS, "num_initial": 1, "num_local": pictures.LOCAL}
    return ops.select_blocks(h.q, k_cmp, **pictures.SIZES, **sizes, top_n=8)[0]


# -- what each way stores --


@pytest.mark.parametrize(("tokens", "block_size"), [(4096, 64), (8192, 32)])
def test_bytes_by_counting_numbers(tokens: int, block_size: int) -> None:
    summaries = (tokens - 32) // 16 + 1
    found = pictures.ways(tokens, block_size, 8, 1024)
    lists = 4 * tokens * 4 * 8
    every, summed, blocks, chunked, running = found.values()
    assert every.memory - lists == 4 * tokens * 64 * summaries
    assert summed.memory - lists == 4 * tokens * 4 * summaries
    # two shares a block
    assert blocks.memory - lists == 4 * tokens * 4 * 2 * (tokens // block_size)
    assert chunked.memory - lists == (blocks.memory - lists) * 1024 // tokens
    assert running.memory == running.traffic == lists
    for way in (every, summed, blocks):
        assert way.traffic - lists == 2 * (way.memory - lists)
    assert chunked.traffic == blocks.traffic


def test_the_kernels_workspace_is_that_of_chunks() -> None:
    """8,192 queries, at 65,536 tokens in blocks of 64, fill what the launch takes at most."""
    way = pictures.ways(65_536, 64, 16, 8192)["block scores, in chunks"]
    assert way.memory - 4 * 65_536 * 4 * 16 == pictures.cells.WORKSPACE


def test_the_panel_of_ways_keeps_chunks_within_the_text() -> None:
    panel = pictures.ways_panel()
    assert "fit into one H200" in panel.sentence
    panel.set(chunk=65_536)
    panel.controls["tokens"].value = 4096
    assert panel.values["chunk"] == 4096
    assert "do not fit" in panel.set(tokens=131_072)


# -- lists --


def test_the_scores_are_those_that_choose(lists: torch.Tensor) -> None:
    scores = pictures.block_scores()
    for query in range(0, 512, 37):
        for head in range(4):
            assert pick(pictures.bits_of(scores[query, head]), 8) == lists[query, head].tolist()


def test_the_last_step_keeps_the_list(lists: torch.Tensor) -> None:
    for query in (20, 300, 505):
        for BT in (3, 8):
            kept = pictures.kept_at_each_step(pictures.block_scores()[query, 2], 8, BT)
            assert len(kept) == -(-32 // BT)
            assert sorted(kept[-1]) == [i for i in lists[query, 2].tolist() if i >= 0]


def test_what_came_and_left_by_running_along() -> None:
    finding = pictures.draw_running(505, 3, 4, 8).finding
    scores = pictures.block_scores()[505, 3]
    scores = torch.where(torch.isinf(scores), 0.0, scores)
    kept = [set(ids) for ids in pictures.kept_at_each_step(scores, 4, 8)]
    left = [before - after for before, after in itertools.pairwise(kept)]
    entered = len(set().union(*kept))
    told = f"{entered} entered the list of 4; {sum(map(len, left))} left, and none came back"
    assert finding == f"Of 32 blocks, {told}"


def test_the_stages_of_the_picture_are_the_networks() -> None:
    a, b = [9, 8, 4, 1], [7, 6, 5, 2]
    stages = pictures.merge_stages(a, b)
    assert len(stages) == 3
    assert stages[-1] == running_top_n.best_of_two(torch.tensor(a), torch.tensor(b)).tolist()
    assert pictures.draw_network(a, b).finding.startswith("4 comparisons tell which 4 stay, and 4")


def test_who_finds_a_better_block_by_running_along(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.tensor([[5.0, 4, 3, 2, 9, 1], [1.0, 2, 3, 4, 3, 5]])
    monkeypatch.setattr(pictures.drawing, "drifting", lambda *_: scores[None, :, None])
    for name, value in {"BLOCKS": 6, "STEP": 2, "N": 2, "QUERIES": 2}.items():
        monkeypatch.setattr(pictures, f"MERGED_{name}", value)
    found = pictures.merges.__wrapped__()
    assert found.tolist() == [[True, False, True], [True, True, True]]
    monkeypatch.setattr(pictures, "merges", lambda: found)
    assert pictures.share_of_tiles(1).tolist() == [1, 0.5, 1]
    assert pictures.share_of_tiles(2).tolist() == [1, 1, 1]


def test_a_single_query_merges_as_often_as_chance_says() -> None:
    """A step of a sixteenth of all blocks holds one of the best 16 in 1 - (15/16)^16 of cases."""
    last = pictures.share_of_tiles(1)[-1].item()
    assert last == pytest.approx(1 - (15 / 16) ** 16, abs=0.05)


# -- halving --


@pytest.mark.parametrize("n", pictures.HALVING_N)
def test_questions_lead_to_the_list(n: int) -> None:
    scores = pictures.block_scores()
    for query in range(3, 512, 41):
        bits = pictures.bits_of(scores[query, 1])
        found = pictures.halvings(query, 1, n)
        assert len(found) <= 31
        for h in found:
            assert h.count == int((bits >= h.middle).sum())
        last = found[-1]
        if last.count == n:
            taken = (bits >= last.middle).nonzero().flatten().tolist()
            assert taken == pick(bits, n)
        else:
            assert len(found) == 31, "the range is down to one number"


def test_the_nth_best_of_any_number_takes_31_questions() -> None:
    for size in (20, 3000):
        scores = torch.rand(size, generator=torch.Generator().manual_seed(size))
        low, asked = pictures.nth_best(pictures.bits_of(scores), 16)
        assert pictures.value_of(low) == scores.sort(descending=True).values[15]
        assert asked == 31


def test_the_sentence_follows_the_questions() -> None:
    questions = range(1, len(pictures.halvings(505, 3, 8)) + 1)
    told = [pictures.told_halving(505, 3, 8, question) for question in questions]
    assert "too few: the range keeps its lower half" in told[0]
    assert told[-1].endswith("exactly as many as the list has places: these are the blocks.")
    early = len(pictures.halvings(20, 0, 8))
    assert early == 31, "down to one number, as the chapter says"
    assert "down to one number" in pictures.told_halving(20, 0, 8, early)


def test_the_halving_panel_keeps_to_its_questions() -> None:
    panel = pictures.halving_panel()
    panel.controls["query"].value = 20
    panel.set(question=30)
    panel.controls["query"].value = 505
    assert panel.values["question"] == len(pictures.halvings(505, panel.values["head"], 8))


def test_bits_and_numbers() -> None:
    for value in (0.0, 1e-30, 0.3, 7.0):
        assert pictures.value_of(pictures.bits_at(value)) == np.float32(value)
    assert pictures.bits_of(torch.tensor([-1.0, -0.0, torch.inf])).tolist() == [
        -1, 0, 0x7F800000,
    ]  # fmt: skip


# -- what was measured --


def test_the_table_names_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"tokens": 65_536, "width": 128, "kernel": "triton", "change": "", "lists": "random"}
    row |= {"direction": "forward", "ms": 2.0}
    rows = [row, row | {"direction": "backward", "ms": 5.0}, row | {"change": "gates", "ms": 1.0}]
    rows += [row | {"kernel": "dense, flash", "lists": "", "ms": 9.0}]
    rows += [row | {"tokens": 8192}, row | {"lists": "smooth"}, row | {"change": "a", "ms": None}]
    monkeypatch.setattr(pictures, "measured", lambda: {"rows": rows})
    assert pictures.measured_table() == {
        "all of NSA": {"forward": 2.0, "backward": 5.0},
        "gates": {"forward": 1.0},
        "dense, flash": {"forward": 9.0},
    }


# -- all of them --


@pytest.mark.parametrize("draw", DRAWN)
def test_a_picture_is_small(draw: str) -> None:
    assert len(getattr(pictures, f"draw_{draw}")().png()) < 60_000
