"""Chapter 13's pictures: inverse lists and meeting programs by counting, the recorded kernel
against the reference backward, and what the pictures say."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from nsa_tutorial.bench import drawing
from nsa_tutorial.course import learning_to_choose
from nsa_tutorial.course.widgets import backward_kernels as pictures
from nsa_tutorial.training import gradients

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, BLOCKS = range(4), range(pictures.N // pictures.BS)


# -- the transpose --


def test_the_transpose_lists_who_lists() -> None:
    ids = pictures.small_lists()
    found = pictures.inverse_of(ids, 4)
    assert len(found) == len(ids) // 4
    for block, rows in found.items():
        assert rows == [row for row, listed in enumerate(ids[:, 0].tolist()) if block in listed]


def test_the_transpose_says_both_lengths() -> None:
    ids = torch.tensor([[0, -1], [0, -1], [1, -1], [0, 1]], dtype=torch.int32)[:, None]
    picture = pictures.draw_transpose(ids, 2, query=3, block=0)
    assert picture.finding == "Query 3 lists 2 blocks; 3 queries list block 0"


# -- kinds of lists --


@pytest.mark.parametrize("kind", pictures.KINDS)
def test_programs_that_meet_by_counting(kind: str) -> None:
    """Programs start with all rows of the first slot."""
    ids = pictures.lists(kind, 1024, 8)[:, 0]
    busiest = []
    for wave in ids.T.flatten().split(pictures.AT_ONCE):
        busiest.append(max(int((wave == block).sum()) for block in range(16)))
    assert pictures.meet(kind, 1024, 8) == pytest.approx(np.mean(busiest))


def test_more_programs_meet_and_take_less_time() -> None:
    """What the chapter tells: of the lists that were timed, contention does not set the time."""
    met = [pictures.meet(kind, 4096, 16) for kind in pictures.KINDS]
    assert met == sorted(met)
    for group in (16, 4):
        rows = [pictures.times(group=group, lists=kind) for kind in pictures.KINDS]
        ms = [row["a program per slot, atomics"]["ms"] for row in rows]
        assert ms == sorted(ms, reverse=True)


def test_the_kinds_are_those_of_the_benchmark() -> None:
    """Neighbours agree more from kind to kind, and all of them list block 0."""
    assert set(pictures.KINDS) == set(drawing.DRIFTS)
    told = pictures.draw_kinds(1024, 8).finding
    shares = [float(x) for x in re.findall(r"\d\.\d", told)]
    assert shares == sorted(shares, reverse=True)
    assert len(shares) == len(pictures.KINDS)


# -- chunks --


def test_chunks_of_the_picture() -> None:
    """A list of 1,024 is cut into eight; what is shorter than two chunks, not at all."""
    finding = pictures.draw_chunks(length=128).finding
    assert finding.startswith("Block 0, listed by 1,024 queries, takes 8 of ")
    assert pictures.draw_chunks(length=1024).finding.startswith(
        "Block 0, listed by 1,024 queries, takes 1 of 16 programs"
    )


# -- one program of the keys' kernel --


def test_all_programs_together_are_the_reference() -> None:
    """What the recorded kernel stores, whole or in shares, adds up to the gradients of keys and
    values; nothing is touched outside of a tensor."""
    e, tensors, c = pictures.example(), pictures.given(), pictures.tables().chunks
    total = {name: np.zeros_like(tensors[name]) for name in "KV"}
    for chunk in (c.last > c.first).nonzero().flatten().tolist():
        seen, stored = pictures.run(chunk, c)
        assert seen.outside() == 0
        first, head = int(c.first_key[chunk]), int(c.head[chunk])
        keys = slice(first, first + pictures.BS)
        for name in "KV":
            whole, share = stored[f"Grad{name}"], stored[f"Shares{name}"]
            mine = share if c.num_parts[chunk] > 1 else whole[keys, head]
            total[name][keys, head] += np.nan_to_num(mine)
    q, k, v = (x.double() for x in (e.q, e.k, e.v))
    o, lse = pictures.selected_attention.forward(
        q, k, v, e.ids, e.rows, block_size=pictures.BS, scale=e.scale
    )
    d_o = torch.from_numpy(tensors["GradO"]).reshape(o.shape)
    _, d_k, d_v, _ = gradients.selected_backward(
        d_o, torch.zeros_like(lse), q, k, v, o, lse, e.ids, e.rows, block_size=pictures.BS,
        scale=e.scale,
    )  # fmt: skip
    for name, right in (("K", d_k), ("V", d_v)):
        np.testing.assert_allclose(total[name], right[0].numpy(), rtol=1e-4, atol=1e-5)


def all_steps(head: int, block: int, part: int) -> list[pictures.Moment]:
    chunk = pictures.programs_of(head, block)[part]
    steps = range(len(pictures.steps_of(chunk)))
    return [pictures.moment(head, block, part, step) for step in steps]


@pytest.mark.parametrize("head", HEADS)
def test_every_query_that_lists_a_block_arrives_once(head: int) -> None:
    ids = pictures.example().ids[:, head]
    for block in BLOCKS:
        parts = range(len(pictures.programs_of(head, block)))
        arrived = [row for part in parts for m in all_steps(head, block, part) for row in m.now]
        listing = (ids == block).any(-1).nonzero().flatten().tolist()
        assert arrived == [row for row in listing if row >= block * pictures.BS]


def test_a_step_adds_its_weights_times_the_gradient_of_the_output() -> None:
    d_o = pictures.given()["GradO"].reshape(-1, pictures.given()["GradO"].shape[-1])
    for head, block, part in ((0, 0, 0), (3, 1, 1), (2, 5, 0)):
        before = 0.0
        for m in all_steps(head, block, part):
            added = m.weights[:, : len(m.touched)] @ d_o[m.touched]
            np.testing.assert_allclose(m.d_v - before, added, atol=1e-9)
            before = m.d_v


def test_masks_where_a_block_is_seen_in_part() -> None:
    """A step without a mask needs none, and some of those with one do."""
    for head in HEADS:
        for block in BLOCKS:
            steps = all_steps(head, block, 0)
            for m in steps:
                assert m.is_masked or m.is_seen[:, : len(m.touched)].all()
            sees_all = bool(steps[0].is_seen[:, : len(steps[0].touched)].all())
            assert steps[0].is_masked is not sees_all


def test_the_sentence_follows_the_program() -> None:
    first = pictures.told_step(0, 0, 0, 0)
    assert (
        "Queries 0, 1, 2, 3 arrive with 4 heads each, 16 query-head rows; behind a mask: 4" in first
    )
    parts = len(pictures.programs_of(0, 0))
    last = pictures.told_step(0, 0, parts - 1, len(all_steps(0, 0, parts - 1)) - 1)
    assert f"stored as share {parts} of {parts}" in last
    for head, block in ((h, b) for h in HEADS for b in BLOCKS):
        for part in range(len(pictures.programs_of(head, block))):
            end = len(all_steps(head, block, part)) - 1
            assert "are added, and the sums are stored" in pictures.told_step(
                head, block, part, end
            )


def test_the_picture_of_a_step_says_why_there_is_a_mask() -> None:
    """Of queries 0 to 3, which see 1 to 4 of 16 keys; later ones see all of them."""
    assert pictures.draw_step(0, 0, 0, 0).finding.endswith(
        "see 16% of block 0: the step has a mask"
    )
    last = pictures.draw_step(0, 0, 1, 0).finding
    assert last.endswith("see 100% of block 0: the step needs no mask")


def test_the_stepper_keeps_to_its_chunks() -> None:
    panel = pictures.stepper()
    panel.set(part=2)
    panel.controls["block"].value = 5
    assert panel.values["part"] == len(pictures.programs_of(0, 5)) - 1
    assert panel.controls["part"].disabled is (len(pictures.programs_of(0, 5)) == 1)


# -- scores that learn to choose --


@pytest.mark.parametrize(
    ("ends", "told"),
    [
        (
            (0.8, 0.05),
            "gentle attention scores learn to find the right block, under peaked to miss it",
        ),
        ((0.25, 0.25), "learn to guess the right block, under peaked to guess it"),
    ],
    ids=["as measured", "nothing is learned"],
)
def test_the_finding_is_read_from_the_runs(
    monkeypatch: pytest.MonkeyPatch, ends: tuple[float, float], told: str
) -> None:
    levels = dict(zip((learning_to_choose.GENTLE, learning_to_choose.PEAKED), ends, strict=True))
    monkeypatch.setattr(pictures, "learned", lambda how, scale: np.full((3, 150), levels[scale]))
    assert told in pictures.draw_learning().finding


def test_curves_are_those_of_the_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        learning_to_choose, "run", lambda how, *, seed, scale: torch.full((4,), seed + scale)
    )
    np.testing.assert_array_equal(pictures.learned.__wrapped__("none", 2.0), [[2.0] * 4, [3.0] * 4])


# -- what was measured --


def test_times_are_of_one_kernel() -> None:
    """Ours in both languages, and dense attention, which costs in proportion to the groups."""
    ours = pictures.times(kernel="tilelang")
    assert list(ours) == ["ours"]
    assert ours["ours"]["direction"] == "backward"
    assert ours["ours"]["ms"] != pictures.times()["ours"]["ms"]
    assert pictures.times(kernel="tilelang", direction="forward")["ours"]["ms"] < ours["ours"]["ms"]
    sixteen, four = pictures.dense_times(16), pictures.dense_times(4)
    assert set(sixteen) == set(four) == {"flash", "cuDNN"}
    for name, ms in sixteen.items():
        assert ms / four[name] == pytest.approx(4, rel=0.1)


# -- all of them --


@pytest.mark.parametrize("draw", ["transpose", "kinds", "chunks", "step"])
def test_a_picture_is_small(draw: str) -> None:
    assert len(getattr(pictures, f"draw_{draw}")().png()) < 60_000
