"""Chapter 18's ranks, its exercises, answers as readers write them, and what its pictures say."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import nbformat
import pytest
import torch

from nsa_tutorial.course import many_gpu_costs as costs
from nsa_tutorial.course import many_gpus_recorded as recorded
from nsa_tutorial.course.exercises import chapter_exercises
from nsa_tutorial.course.exercises import many_gpus as solutions
from nsa_tutorial.course.judging import judge
from nsa_tutorial.course.ranks import RanksApart, on_ranks
from nsa_tutorial.course.ranks_together import beside_one_process
from nsa_tutorial.course.widgets import many_gpus as pictures
from nsa_tutorial.training.many_gpus.cuts import Cut

pytestmark = pytest.mark.usefixtures("one_thread")

CHAPTER = Path(__file__).parents[2] / "notebooks" / "18_many_gpus.ipynb"
KNOWN = chapter_exercises("many_gpus")


# -- ranks --


@pytest.mark.parametrize("over", ["threads", "gloo"])
def test_ranks_gather_and_add_up(over: str) -> None:
    def both(rank):
        x = torch.tensor([1.0, 2.0]) + 10 * rank.number
        parts = [x + other for other in range(rank.ranks)]
        return torch.cat(rank.gather(x)), rank.reduce_scatter(parts), rank.sent

    for number, (gathered, mine, sent) in enumerate(on_ranks(3, both, over=over)):
        assert gathered.tolist() == [1, 2, 11, 12, 21, 22]
        assert mine.tolist() == [33 + 3 * number, 36 + 3 * number]
        assert sent == 2 * 2 * 8


def test_neighbours_send_rows_of_any_number() -> None:
    def both(rank):
        x = torch.arange(rank.number + 1)
        return rank.to_next(x).tolist(), rank.to_previous(x).tolist(), rank.sent

    assert on_ranks(3, both) == [([], [0, 1], 8), ([0], [0, 1, 2], 32), ([0, 1], [], 24)]


@pytest.mark.parametrize(
    ("other", "error", "told"),
    [
        (lambda rank: None, RanksApart, "rank 1 waits in `gather`, and rank 0 has ended"),
        (lambda rank: 1 / 0, ZeroDivisionError, "division by zero"),
        (
            lambda rank: rank.to_next(torch.ones(1)),
            RanksApart,
            "rank 0 calls `to_next`, and rank 1",
        ),
        (lambda rank: rank.gather(3), TypeError, "`gather` sends tensors, and got int"),
        (lambda rank: rank.reduce_scatter([torch.ones(1)]), ValueError, "3 tensors, and got 1"),
    ],
)
@pytest.mark.parametrize("over", ["threads", "gloo"])
def test_a_rank_that_does_something_else_ends_all(other, error, told: str, over: str) -> None:
    def one(rank):
        return other(rank) if rank.number == 0 else rank.gather(torch.ones(1))

    before = threading.active_count()
    with pytest.raises(error, match=told):
        on_ranks(3, one, over=over)
    assert threading.active_count() == before


def test_what_is_sent_is_a_copy() -> None:
    def one(rank):
        x = torch.zeros(1)
        everyone = rank.gather(x)
        x += 1
        everyone[0] += rank.number
        rank.gather(x)  # nobody reads before all have written
        return everyone[0].item(), everyone[1].item()

    assert on_ranks(2, one) == [(0, 0), (1, 0)]


@pytest.mark.exhaustive
def test_nothing_imports_a_language() -> None:
    chapter = "import nsa_tutorial.course.widgets.many_gpus, sys; "
    asked = "print([name for name in ('triton', 'tilelang') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", chapter + asked], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[]", done.stderr


# -- solutions --


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("ranks", "tokens"), [(1, 5), (3, 10), (4, 26), (4, 5)])
def test_positions_are_the_packages(kind: str, ranks: int, tokens: int) -> None:
    cut = Cut(ranks, tokens, kind)
    for rank in range(ranks):
        found = solutions.positions_of(rank, ranks, tokens, kind == "zigzag")
        assert found == cut.positions(rank).tolist()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_forward_and_gradients_are_those_of_one_process(ranks: int) -> None:
    errors = beside_one_process(solutions.context_parallel, solutions.gradients_home, ranks)
    assert max(errors.values()) < 1e-12


def test_every_case_is_the_attention_of_one_process() -> None:
    for case in KNOWN["context_parallel"].cases:
        lengths, window, slots, H, block_size, counts = case.arguments()
        found = solutions._forward(solutions.context_parallel, *case.arguments())
        q, k, v, *near, lists = solutions.text_of(lengths, H, slots, block_size)
        right = solutions.selected_attention(q, k, v, lists, block_size)
        right = right + solutions.window_attention(q, *near, window)
        torch.testing.assert_close(found[0] if counts else found, right, atol=1e-12, rtol=0)


# -- answers as readers write them --


@pytest.mark.parametrize("name", KNOWN)
def test_each_mistake_is_named_as_itself(name: str) -> None:
    for mistake in KNOWN[name].misconceptions:
        assert judge(KNOWN[name], mistake.wrong).misconceptions == (mistake.name,), mistake


def without_a_halo(rank, q, far, near, block_indices, block_size, window_size):
    """Right on one rank alone."""
    o = solutions.selected_attention(q, *far, block_indices, block_size)
    return o + solutions.window_attention(q, *near, window_size)


def all_gathered(rank, q, far, near, block_indices, block_size, window_size):
    """Right, and everything travels."""
    k, v, *near = (torch.cat(rank.gather(x)[: rank.number + 1]) for x in (*far, *near))
    o = solutions.window_attention(q, *near, window_size)
    return o + solutions.selected_attention(q, k, v, block_indices, block_size)


@pytest.mark.parametrize(("attempt", "held"), [(without_a_halo, 1), (all_gathered, 5)])
def test_a_half_done_forward_holds_its_stages(attempt, held: int) -> None:
    assert judge(KNOWN["context_parallel"], attempt).held == held


def own_alone(rank, d_far, d_near, lengths):
    n = lengths[rank.number]
    return d_far[-n:], d_near[-n:]


def far_alone(rank, d_far, d_near, lengths):
    """In another form: every rank sends a part of zeros to those after it."""
    parts = [torch.zeros(n, *d_far.shape[1:]).double() for n in lengths]
    parts[: rank.number + 1] = d_far.split(lengths[: rank.number + 1])
    return rank.reduce_scatter(parts), d_near[-lengths[rank.number] :]


@pytest.mark.parametrize(("attempt", "held"), [(own_alone, 1), (far_alone, 2)])
def test_half_a_way_home_holds_its_stages(attempt, held: int) -> None:
    assert judge(KNOWN["gradients_home"], attempt).held == held


def test_a_rank_that_stays_away_is_told() -> None:
    def attempt(rank, q, far, near, block_indices, block_size, window_size):
        if rank.number == 0:
            return without_a_halo(rank, q, far, near, block_indices, block_size, window_size)
        return all_gathered(rank, q, far, near, block_indices, block_size, window_size)

    assert "rank 0 has ended" in judge(KNOWN["context_parallel"], attempt).text


def test_the_minutes_are_told() -> None:
    first = nbformat.read(CHAPTER, as_version=4).cells[0].source
    assert f"{sum(e.minutes for e in KNOWN.values())} of them exercises" in first


# -- counts --


def test_products_are_those_of_each_query() -> None:
    """One by one, over a border where lists and windows are full."""
    for start, stop in ((0, 40), (1000, 1100)):
        by_hand = 0
        for t in range(start, stop):
            summaries = max(0, (t + 1 - 32) // 16 + 1)
            lists = t + 1 if t < 1024 else 15 * 64 + t % 64 + 1
            by_hand += 3 * summaries + 2 * (lists + min(t + 1, 512))
        assert costs.products(start, stop) == by_hand


def test_idle_shares_of_a_triangle_are_known() -> None:
    for ranks in (2, 4, 8):
        idle = costs.idle_share(Cut(ranks, 1 << 20, "contiguous"), "dense")
        assert idle == pytest.approx(1 - ranks / (2 * ranks - 1), abs=1e-4)
        assert costs.idle_share(Cut(ranks, 1 << 20, "zigzag"), "dense") == pytest.approx(0)
    assert costs.idle_share(Cut(1, 100)) == costs.idle_share(Cut(2, 0)) == 0


def test_a_plan_counts_what_its_words_say() -> None:
    p = costs.plan(1 << 20, 64)
    assert p.nvlink_bytes == 4 * 2 * 2**30 * 7 // 8  # two gathers, and gradients twice as wide
    assert p.infiniband_bytes == 4 * 2 * 2**30 * 56 // 64 // 8
    assert p.travel_s == pytest.approx(p.infiniband_bytes / 50e9)
    assert p.layer_bytes == 4 * (1 << 14) * 64 * 128 * 2 + 2 * 2**30 + 2 * 2**30
    assert costs.plan(1 << 20, 8).infiniband_bytes == 0
    assert costs.seconds(65_536) == pytest.approx(0.0967, abs=1e-3)
    meet = costs.crossing()
    assert costs.seconds(meet, costs.SQUARE) == pytest.approx(
        costs.seconds(meet, costs.LINEAR), 1e-4
    )


def test_what_the_text_says_of_the_table() -> None:
    """Each statement of the chapter that no cell prints."""
    found = {(p.tokens >> 20, p.gpus): p for p in costs.plans()}
    near, wide, far = found[1, 8], found[1, 512], found[8, 512]
    assert (round(1e3 * near.travel_s), round(near.compute_s, 1)) == (17, 2.3)
    assert (round(1e3 * wide.travel_s), round(1e3 * wide.compute_s)) == (21, 36)
    assert round(far.layer_bytes / 2**30) == 33
    assert 8 * 4 * 2**30 / far.layer_bytes > 0.95  # gathered, and gradients for it
    assert round(far.compute_s, 1) == 2.2 and far.choice_share > 0.99
    assert [round(100 * costs.idle_share(Cut(8, N, "contiguous"))) for N in (1 << 15, 1 << 16)] == [
        31, 37,
    ]  # fmt: skip
    linear = costs.seconds(65_536, costs.LINEAR) / costs.seconds(65_536)
    counted = 2 * 1536 / (3 * 2048 + 2 * 1536)
    assert linear > counted  # lists run slower than their products say
    held = costs.held(1 << 20, 1)
    assert held["queries"] + held["outputs"] == 32 * 2**30
    assert held["own keys and values"] == 2 * 2**30


# -- pictures --


def test_pictures_say_what_they_show() -> None:
    assert "each of 4 ranks keeps 8 GiB" in pictures.draw_who().finding
    assert pictures.shares(4, "contiguous") == [4, 12, 20, 28]
    assert pictures.shares(4, "zigzag") == [16, 16, 16, 16]
    assert "has 7 of 16 parts" in pictures.draw_cut().finding
    assert "needs 4 tokens of rank 0" in pictures.draw_halo().finding
    assert "2 summaries straddle" in pictures.draw_halo(length=6).finding
    assert "goes to its owner" in pictures.draw_back().finding
    assert "19% of the time at 8k tokens, 46% at 1M" in pictures.draw_idle().finding
    assert "at 8M, 99.3% of the time" in pictures.draw_wall().finding


def test_the_panel_moves() -> None:
    panel = pictures.explore()
    assert "4 ranks, contiguous: each holds 1.00 GiB of queries and outputs" in panel.sentence
    assert "Idle: 0% in NSA, 0% in dense" in panel.set(kind="zigzag")
    assert "1 rank, zigzag" in panel.set(ranks=1)
    assert "it sends 0.00 GiB" in panel.sentence
    assert "32 ranks" in panel.set(ranks=32, tokens=1 << 23)


# -- the recording --


def test_what_the_text_says_of_the_recording() -> None:
    """Each statement of the chapter that no cell prints."""
    for queries in ("random", "smooth"):
        one, flat, zigzag = (recorded.speed(c, queries)["ms"] for c in (None, *recorded.CUTS))
        assert one / 2 < zigzag < flat < one
    counted = [costs.idle_share(Cut(2, 1 << 17, kind)) for kind in recorded.CUTS]
    measured = [recorded.idle_share(kind) for kind in recorded.CUTS]
    assert counted[0] > measured[0] > 5 * measured[1] > 0  # the order is right, and overstated
    ranks = recorded.rows("timeline", cut="zigzag")
    extra = [row["compute_ms"] - recorded.speed(None)["ms"] / 2 for row in ranks]
    left = [row["communication_ms"] - row["hidden_ms"] for row in ranks]
    assert sum(extra) > sum(left)  # mostly computing
    waits = recorded.rows("timeline", cut="contiguous")[0]
    assert waits["communication_ms"] > 10 * ranks[0]["communication_ms"]


def test_the_recording_agrees_with_counting() -> None:
    said = recorded.agreements()
    assert said[0].endswith("True")
    assert " 0 of " in said[1]
    assert len(said) == 4


def test_bytes_by_hand_are_those_of_the_panel() -> None:
    for row in recorded.rows("bytes"):
        sent = costs.sent(Cut(2, row["tokens"], row["cut"]))
        sent.pop("halo of the window")  # all branches shared their keys
        assert row["ranks"][0]["by_hand"]["forward"] == sent


def test_the_recorded_pictures_say_what_they_show() -> None:
    assert "Two GPUs with a zigzag are 1." in recorded.draw_speed().finding
    assert "is hidden behind computing" in recorded.draw_timeline().finding
    assert recorded.recording()["machine"] in recorded.told()
