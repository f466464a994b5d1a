"""Chapter 11's frame: the recorder on the Triton kernel, pictures, what was measured, exercises
that say what the kernel does."""

from __future__ import annotations

import inspect
import itertools
import json
import linecache
import math
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import places
import pytest
import torch
from selection import Problem

from nsa_tutorial.bench.steps import PROBE
from nsa_tutorial.course import exercises, lowered, phases, recorder
from nsa_tutorial.course.exercises import triton_forward as chapter_11
from nsa_tutorial.course.judging import judge
from nsa_tutorial.course.languages import tl, triton
from nsa_tutorial.course.watching import watching
from nsa_tutorial.course.widgets import triton_forward as pictures
from nsa_tutorial.runtime import environment
from nsa_tutorial.sparse import selected_attention, sliding_window

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "11_triton_forward.ipynb"
needs_triton = pytest.mark.skipif(
    environment.detect().why_not("triton", "cpu") is not None,
    reason="Triton does not run on this CPU",
)
PROBLEMS = {
    "a group of 1, widths of 1": Problem(N=3, M=3, H=1, G=1, D=1, DV=1, BS=2, S=2),
    "more keys than queries": Problem(B=2, N=3, M=11, H=2, G=3, D=5, DV=7, BS=4, S=3),
    "packed, own block, counts": Problem(
        N=9, M=9, H=2, G=2, D=3, DV=2, BS=2, cu=(0, 3, 3, 4, 9), own=True, counts="random"
    ),
    "not causal": Problem(N=3, M=7, H=1, G=4, D=4, DV=4, BS=3, causal=False),
    "a group of 20": Problem(N=2, M=5, H=2, G=20, D=2, DV=3, BS=2, S=2),
}


def prose() -> str:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def made(problem: Problem) -> tuple:
    """The tensors, lists and rows of a problem, as a backend gets them."""
    call = problem.make(torch.float32, "cpu")
    given = call.options
    rows = selected_attention.query_rows(
        problem.B,
        problem.N,
        problem.M,
        causal=given["causal"],
        cu_seqlens=given["cu_seqlens"],
        device=torch.device("cpu"),
    )
    lists = {"block_counts": given["block_counts"], "include_own_block": given["include_own_block"]}
    return (
        call.q,
        call.k,
        call.v,
        selected_attention.block_list(call.ids, rows, block_size=problem.BS, **lists),
        rows,
    )


# -- the recorder --


@pytest.mark.parametrize("BT", [None, 1], ids=["whole blocks", "a step for each token"])
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_all_programs_together_are_the_twin(problem: Problem, BT: int | None) -> None:
    """What the recorded programs store is what the PyTorch twin returns; each element once, and
    nothing outside of a tensor."""
    q, k, v, ids, rows = made(problem)
    call = pictures.arguments(q, k, v, ids, rows, block_size=problem.BS, BT=BT)
    seen = [
        pictures.program(ids_, call)
        for ids_ in recorder.programs((len(rows.first_key), k.shape[2]))
    ]
    for tensor in ("Output", "LSE"):
        assert (sum(record.touched("store", tensor) for record in seen) == 1).all()
    assert sum(record.outside() for record in seen) == 0
    o, lse = selected_attention.forward(
        q, k, v, ids, rows, block_size=problem.BS, scale=problem.D**-0.5
    )
    np.testing.assert_allclose(call["Output"].ravel(), o.ravel(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(call["LSE"].ravel(), lse.ravel(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("BT", [None, 1], ids=["whole blocks", "a step for each token"])
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_descriptors_give_what_the_twin_gives(problem: Problem, BT: int | None) -> None:
    """The other kernel, from its own source: nothing past a tensor's end, and nothing that its
    query may not see."""
    q, k, v, ids, rows = made(problem)
    call = pictures.arguments(q, k, v, ids, rows, block_size=problem.BS, BT=BT)
    for program in recorder.programs((len(rows.first_key), k.shape[2])):
        seen = pictures.descriptor_program(program, call)
        boxes = [a for a in seen.accesses if a.kind == "load" and a.tensor in "KV"]
        first, visible = rows.first_key[program[0]].item(), rows.num_visible[program[0]].item()
        for access in boxes:
            row = access.touched // math.prod(seen.shapes[access.tensor][1:])
            assert ((row >= first) & (row < first + visible)).all()
        assert seen.outside() == 0
    o, lse = selected_attention.forward(
        q, k, v, ids, rows, block_size=problem.BS, scale=problem.D**-0.5
    )  # fmt: skip
    np.testing.assert_allclose(call["Output"].ravel(), o.ravel(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(call["LSE"].ravel(), lse.ravel(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_a_program_loads_the_keys_that_its_query_sees_and_no_others(problem: Problem) -> None:
    q, k, v, ids, rows = made(problem)
    call = pictures.arguments(q, k, v, ids, rows, block_size=problem.BS)
    options = problem.make(torch.float32, "cpu").options
    mask = selected_attention.dense_mask(
        problem.make(torch.float32, "cpu").ids, problem.M, block_size=problem.BS,
        causal=options["causal"],
        block_counts=options["block_counts"], include_own_block=options["include_own_block"],
        cu_seqlens=options["cu_seqlens"],
    )  # fmt: skip
    for row, head in recorder.programs((problem.B * problem.N, k.shape[2])):
        b, n = divmod(row, problem.N)
        for tensor in ("K", "V"):
            loaded = (
                pictures.program((row, head), call)
                .touched("load", tensor)
                .reshape(problem.B, problem.M, k.shape[2], -1)
                > 0
            )
            expected = np.zeros(loaded.shape, dtype=bool)
            expected[b, :, head] = mask[b, n, head].numpy()[:, None]
            np.testing.assert_array_equal(loaded, expected)


@pytest.mark.parametrize("window_size", [1, 3, 6])
def test_a_window_is_a_list_too(window_size: int) -> None:
    """Other rows and the list 0, 1, 2, … make the kernel compute windows."""
    q, k, v, _, rows = made(PROBLEMS["packed, own block, counts"])
    ids, windows = sliding_window.as_selection(rows, window_size=window_size, block_size=4)
    every = ids.expand(len(rows.position), k.shape[2], -1)
    call = pictures.arguments(q, k, v, every, windows, block_size=4)
    for program in recorder.programs((len(every), k.shape[2])):
        assert pictures.program(program, call).outside() == 0
    found = sliding_window.forward(q, k, v, rows, window_size=window_size, scale=3**-0.5)
    for stored, expected in zip((call["Output"], call["LSE"]), found, strict=True):
        np.testing.assert_allclose(stored, expected.reshape(stored.shape), rtol=1e-4, atol=1e-5)


@needs_triton
def test_the_recorder_stores_what_the_interpreter_stores() -> None:
    from nsa_tutorial.kernels.triton.selected import forward as triton_forward

    q, k, v, ids, rows = made(PROBLEMS["more keys than queries"])
    call = pictures.arguments(q, k, v, ids, rows, block_size=4)
    for program in recorder.programs((len(ids), k.shape[2])):
        pictures.program(program, call)
    o, lse = triton_forward.launch(q, k, v, ids, rows, block_size=4, scale=5**-0.5)
    np.testing.assert_allclose(call["Output"].ravel(), o.ravel(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(call["LSE"].ravel(), lse.ravel(), rtol=1e-4, atol=1e-5)


def test_integers_stay_integers() -> None:
    """An id loaded as a float could not be an index; what is loaded outside of an integer tensor is
    no number of the tensor's."""

    def load(X, N):
        tl.store(X + 0, tl.load(X + N))

    x = np.arange(1, 4)
    seen = recorder.run(load, (0,), {"X": x, "N": 3})
    assert seen.outside() == 1
    assert x.dtype.kind == "i" and x[0] < 0


# -- pictures --


def test_the_offsets_within_a_tile_stay() -> None:
    first, second = pictures.loads(pictures.pointer_example(), "K")
    moved = second.offsets - first.offsets
    assert (moved == moved.flat[0]).all()
    assert (
        pictures.draw_pointers().finding
        == f"From block 0 to block 2 the base moves by {moved.flat[0]}; the 8 distances stay"
    )
    assert first.mask.all() and second.mask.sum() == 4, "block 2 has two keys of four"


@pytest.mark.parametrize("window_size", [1, 4, 6])
def test_windows(window_size: int) -> None:
    block = pictures.windows(16, window_size)
    assert ((block >= 0).sum(1) == np.minimum(np.arange(16) + 1, window_size)).all()
    assert (block[np.arange(16), np.arange(16)] >= 0).all()
    assert block.max() == (window_size - 1) // 4


def test_pictures() -> None:
    findings = {
        pictures.draw_windows: "A window of 6 is 6 keys; whole aligned blocks would show 6 to 9",
        pictures.draw_packed: "Two numbers for each query keep 3 texts apart",
        pictures.draw_poisoned: "One key of weight 0, loaded: 4 of 4 numbers are NaN",
        pictures.draw_step: "Token 77, slot 0: 14 of block 4's 16 keys load; "
        "the other two are its future",
    }
    for draw, finding in findings.items():
        picture = draw()
        assert picture.finding == finding
        assert len(picture.png()) < 60_000


def test_a_mask_less() -> None:
    """With its masks the program sees no NaN; without that of the values, one key spoils all of
    the answer, though its weight is 0. The others' keys are NaN both times."""
    call = pictures.poisoned()
    pictures.program((6, 1), call)
    healthy = {name: np.nan_to_num(x) if name in "KV" else x for name, x in call.items()}
    healthy |= {"Output": np.full_like(call["Output"], np.nan)}
    pictures.program((6, 1), healthy)
    np.testing.assert_array_equal(call["Output"][6, 1], healthy["Output"][6, 1])
    assert np.isfinite(call["Output"][6, 1]).all()
    assert np.isnan(call["V"]).sum() == 26 and call["V"].size == 40, "what the chapter says"
    unread = pictures.poisoned()
    pictures.program((6, 1), unread, "mask=k_mask, other=0.0")
    np.testing.assert_array_equal(unread["Output"][6, 1], call["Output"][6, 1])
    broken = pictures.poisoned()
    seen = pictures.program((6, 1), broken, pictures.MASK_OF_V)
    loaded = {int(n) // 4 for access in pictures.loads(seen, "V") for n in access.touched if n < 40}
    assert np.isnan(broken["Output"][6, 1]).all() and 7 in loaded
    with pytest.raises(ValueError, match="does not stand in"):
        pictures.program((6, 1), broken, "mask=w_mask")


@pytest.mark.parametrize(("token", "head"), [(77, 0), (20, 3), (0, 1)])
def test_the_stepper_shows_one_program_twice(token: int, head: int) -> None:
    """In every step the kernel loads the keys that the twin sees, and at the end has the twin's
    output."""
    pictures.record(token, head)
    o, lse = pictures.twin().result
    place, mine = (token, head), slice(4 * head, 4 * head + 4)
    np.testing.assert_allclose(
        pictures.given()["Output"][place], o[0, token, mine], rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        pictures.given()["LSE"][place], lse[0, token, mine], rtol=1e-4, atol=1e-5
    )
    for slot in range(pictures.slots(token, head)):
        m = pictures.moment(token, head, slot)
        np.testing.assert_array_equal(m.is_seen, np.isfinite(m.scores).all(0))


def test_panel() -> None:
    panel = pictures.explore()
    assert panel.sentence == pictures.sentence(77, 0, 0)
    assert "slot 1: an empty slot. All 512 elements are masked" in panel.set(slot=1)
    assert "slot 0: block 0" in panel.set(token=3, slot=3), "an early query has fewer slots"


@pytest.mark.parametrize(("token", "steps"), [(0, 1), (17, 3), (77, 4)])
def test_the_panel_offers_the_steps_that_the_program_takes(token: int, steps: int) -> None:
    """A list is walked up to its last block that is visible."""
    panel = pictures.explore()
    panel.set(token=token)
    slot = panel.controls["slot"]
    assert (slot.min, slot.max, slot.disabled) == (0, steps - 1, steps == 1)
    drawn = pictures.draw_step(token, 0, steps - 1).finding
    assert drawn.startswith(f"Token {token}, slot {steps - 1}: ")
    with pytest.raises(IndexError):
        pictures.sentence(token, 0, steps)


def test_the_panel_says_that_the_slot_moved() -> None:
    panel = pictures.explore()
    panel.set(slot=3)
    panel.controls["token"].value = 17
    assert panel.moved == "slot: 3 is out of range here, now 2."


# -- what the kernels become --


@pytest.mark.exhaustive  # chapter 11 prints it
@needs_triton
def test_only_descriptors_use_the_memory_accelerator() -> None:
    taught, fast = (
        lowered.triton_stages(kernel=name) for name in (pictures.KERNEL, pictures.DESCRIPTOR_KERNEL)
    )
    assert "cp.async.bulk.tensor" not in taught["ptx"]
    assert "mbarrier" not in taught["ptx"]
    assert fast["ptx"].count("cp.async.bulk.tensor") > 2
    for stages in (taught, fast):
        assert "cp.async.cg" in stages["ptx"] and "mma.sync" in stages["ptx"]
    assert "instrShape = [16, 8]" in taught["ttgir"]


@pytest.mark.exhaustive
@needs_triton
@pytest.mark.parametrize(
    ("arch", "dtype", "kernel"),
    places.pairwise(
        ("sm_80", "sm_90", "sm_100"), ("float16", "bfloat16", "float32"),
        (pictures.KERNEL, pictures.DESCRIPTOR_KERNEL),
    ),
)  # fmt: skip
def test_both_kernels_compile(arch: str, dtype: str, kernel: str) -> None:
    ptx = lowered.triton_stages(arch, dtype, kernel=kernel)["ptx"]
    assert f".target {arch}" in ptx
    assert "tf32" not in ptx


# -- what was measured --


def test_the_stored_table() -> None:
    told = pictures.measured()
    assert re.match(
        r"python -m nsa_tutorial.bench selected --backend triton .*--steps", told["command"]
    )
    assert "H200" in told["machine"]
    for row in told["rows"]:
        assert row["ms"] is not None, row["note"]
        assert row["is_right"] or row["kernel"].startswith("dense") or row["change"] == PROBE, row[
            "change"
        ]


# The kernel as it is, measured four times.
SAME = "pointers", "pointers, steps of 32 tokens", "pointers, 1 warp", "pointers, 3 stages"


def test_what_the_chapter_says_of_the_table() -> None:
    found = {change: row["ms"] for change, row in pictures.times().items()}
    noise = [found[change] for change in SAME]
    assert min(noise) <= found["pointers"] <= max(noise)
    assert found["descriptors"] < min(noise), "faster at width 128"
    for change in pictures.CHANGED:
        assert found[change] > 1.05 * found["pointers"] or change == "pointers, steps of 16 tokens"
    assert max(pictures.CHANGED, key=found.get) == "pointers, steps of 64 tokens"
    narrow = {change: row["ms"] for change, row in pictures.times(width=64).items()}
    noise = [narrow[change] for change in SAME]
    assert 0.99 * min(noise) < narrow["descriptors"] < max(noise), "at width 64 hardly a gain"
    picture = pictures.draw_ladder()
    worst = found["pointers, steps of 64 tokens"]
    assert picture.finding == (
        f"Steps of 64 tokens in place of 32: {found['pointers']:.1f} ms become {worst:.1f}"
    )
    assert len(picture.png()) < 60_000
    for tokens, _, ours, theirs in pictures.beside_tilelang():
        assert (ours > 8 and theirs > 8) if tokens == 65536 else (1 < ours < 2 and 1 < theirs < 2)


def test_the_probe_takes_as_long_as_the_kernel() -> None:
    for tokens, width in itertools.product((65536, 8192), (128, 64)):
        found = {change: row["ms"] for change, row in pictures.times(tokens, width=width).items()}
        once, again, probe = (found[name] for name in ("descriptors", "as it is", PROBE))
        assert max(once, again) / min(once, again) < 1.045, "two times that differ by up to 4 %"
        if width == 128:
            assert abs(probe / once - 1) < 0.02, "1 % slower, and 2 % faster"
            noise = 0.03 if tokens == 8192 else 0.0
            assert round(again / once - 1, 2) == noise, "3 % at 8,192 tokens"
        else:
            assert probe > 1.05 * max(once, again), "slower"


def test_each_time_says_what_it_is_a_time_of() -> None:
    """One name and one time for chapter 11's kernel, from the file, with the recording above it."""
    told, row = pictures.measured(), pictures.times()["pointers"]
    head, *lines = pictures.time_of_the_kernel()
    assert head == (
        f"{told['machine']}, Triton {told['triton']}, torch {told['torch']}: 65,536 tokens of "
        "width 128, bfloat16,\n4 KV heads with groups of 16, random lists of 16 blocks of 64:"
    )
    assert lines[0].split() == ["chapter", "11's", "kernel", f"{row['ms']:.1f}", "ms"]
    assert f"with descriptors {pictures.times()['descriptors']['ms']:5.2f} ms" in "".join(
        pictures.beside_descriptors()
    )
    assert "--lists" not in told["command"], "so the lists are the benchmark's default, random"


def test_occupancy_alone_does_not_explain_steps_of_64() -> None:
    """Half the programs and twice the time, and half the programs without it: the same memory, one
    warp, 64 keys a step."""
    one_warp, two_warps, of_10 = (
        float(line.split()[-2]) for line in pictures.steps_of_64()[1:]
    )  # fmt: skip
    assert one_warp == round(pictures.times()["pointers, steps of 64 tokens"]["ms"], 1)
    assert one_warp > 1.7 * max(two_warps, of_10)
    tiles = {steps: (2 * 2 * steps * 128 + 16 * 128) * 2 for steps in (32, 64)}
    assert [tiles[n] // 1024 for n in (32, 64)] == [36, 68]
    assert [228 * 1024 // (tiles[n] + 1024) for n in (32, 64)] == [6, 3], "1 KiB is the system's"


def test_the_gain_over_dense_attention() -> None:
    """The gain is about a third of how many fewer keys there are."""
    for tokens, _, *ratios in pictures.beside_tilelang():
        assert all(0.25 < ratio / (tokens / 2 / 1024) < 0.45 for ratio in ratios)


# -- the exercises say what the kernel does --

EXERCISES = {e.name: e for e in chapter_11.EXERCISES}


def solution(name: str):
    return exercises.chapter_exercises("triton_forward")[name].solution


def cases(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "case",
        exercises.chapter_exercises("triton_forward")[name].cases,
        ids=lambda case: case.name,
    )


OPTIONAL = ("first_scores", "locate", "walked_slots", "window_row")


def test_the_minutes_are_told() -> None:
    """Those of the exercises in optional parts are not among the chapter's."""
    minutes = {e.name: e.minutes for e in exercises.chapter_exercises("triton_forward").values()}
    main, optional = prose().split("### If you have more time")
    told = [int(n) for n in re.findall(r"^About (\d+) minutes", optional, flags=re.M)]
    assert f"Seven parts, about {sum(told)} minutes together" in optional and len(told) == 7
    for name in OPTIONAL:
        assert f"`{name}`" in optional
        assert minutes.pop(name) < max(told)
    assert f"{sum(minutes.values())} of them exercises" in main
    assert int(re.search(r"About (\d+) minutes", main).group(1)) <= 75


@pytest.mark.parametrize("G", [1, 4, 16, 20])
def test_first_scores_is_addressed_as_the_kernel_is(G: int) -> None:
    """The same rows of Q and of the result, from the source of both."""
    q, k, v, ids, rows = made(Problem(N=3, M=3, H=2, G=G, D=2, DV=2, BS=2, S=1))
    call = pictures.arguments(q, k, v, ids, rows, block_size=2)
    given = {name: call[name] for name in ("Q", "K", "H", "G", "D", "GT")}
    for program in recorder.programs((3, 2)):
        kernel = pictures.program(program, call)
        small = given | {"Score": np.full((3, 2, G), np.nan)}
        seen = recorder.run(chapter_11.first_scores().fn, program, small)
        for kind, ours, theirs in (("load", "Q", "Q"), ("store", "Score", "LSE")):
            touched = kernel.touched(kind, theirs) > 0
            assert touched.any()
            np.testing.assert_array_equal(seen.touched(kind, ours) > 0, touched)
        assert seen.outside() == 0


@cases("key_rows")
def test_key_rows_is_what_the_kernel_loads(case: exercises.Case) -> None:
    ids, first_key, num_visible, BS = case.arguments()
    k = torch.zeros(1, first_key + num_visible + BS, 1, 1)
    rows = selected_attention.QueryRows(
        *(torch.tensor([n]) for n in (first_key, num_visible, num_visible - 1))
    )
    lists = torch.tensor(ids).reshape(1, 1, -1)
    seen = pictures.program((0, 0), pictures.arguments(k[:, :1], k, k, lists, rows, block_size=BS))
    loaded = [
        np.where(a.mask[:, 0], a.offsets[:, 0], -1).tolist() for a in pictures.loads(seen, "K")
    ]
    walked = solution("walked_slots")(ids, -(-num_visible // BS))  # nothing is loaded behind
    assert len(loaded) == walked
    assert solution("key_rows")(*case.arguments()).tolist() == loaded + [[-1] * BS] * (
        len(ids) - walked
    )


@cases("walked_slots")
def test_walked_slots_is_how_many_steps_the_kernel_takes(case: exercises.Case) -> None:
    ids, num_blocks = case.arguments()
    k = torch.zeros(1, 40, 1, 1)
    lists = torch.tensor(ids, dtype=torch.int64).reshape(1, 1, -1)
    # a block a step, and two steps a block; the last block visible as a whole, and in part
    for (BS, BT), missing in itertools.product(((2, 2), (4, 2)), (0, 1)):
        visible = num_blocks * BS - missing
        rows = selected_attention.QueryRows(*(torch.tensor([n]) for n in (0, visible, visible - 1)))
        call = pictures.arguments(k[:, :1], k, k, lists, rows, block_size=BS, BT=BT)
        steps = len(pictures.loads(pictures.program((0, 0), call), "K"))
        assert steps == solution("walked_slots")(ids, num_blocks) * BS // BT


@cases("locate")
def test_locate_is_query_rows(case: exercises.Case) -> None:
    (cu,) = case.arguments()
    rows = selected_attention.query_rows(
        1, cu[-1], cu[-1], causal=True, cu_seqlens=torch.tensor(cu), device=torch.device("cpu")
    )
    assert solution("locate")(cu) == (rows.first_key.tolist(), rows.num_visible.tolist())


@cases("window_row")
def test_window_row_is_what_the_kernel_walks(case: exercises.Case) -> None:
    position, first_key, window_size, BS = case.arguments()
    rows = selected_attention.QueryRows(
        *(torch.tensor([n]) for n in (first_key, position + 1, position))
    )
    _, window = sliding_window.as_selection(rows, window_size=window_size, block_size=BS)
    row, num_visible, num_slots = solution("window_row")(*case.arguments())
    assert (row, num_visible) == (window.first_key.item(), window.num_visible.item())
    k = torch.zeros(1, first_key + position + 1, 1, 1)
    lists = torch.arange(num_slots).reshape(1, 1, -1)
    call = pictures.arguments(k[:, :1], k, k, lists, window, block_size=BS)
    steps = pictures.loads(pictures.program((0, 0), call), "K")
    assert len(steps) == num_slots
    assert np.concatenate([step.touched for step in steps]).tolist() == list(
        range(row, row + num_visible)
    )


# -- the kernel that the reader writes --

BUILD = "triton_selected_attention"


@needs_triton
@pytest.mark.parametrize("name", ["packed, own block, counts", "not causal", "a group of 20"])
def test_the_solution_is_the_twin(name: str) -> None:
    """It takes what every backend takes, less the batch; its widths and blocks are those that a
    reader's kernel is asked for."""
    problem = replace(PROBLEMS[name], D=16, DV=32, BS=16)
    q, k, v, ids, rows = made(problem)
    k, v = (x.flatten(0, 1) for x in (k, v))
    found = solution(BUILD)(
        q.flatten(0, 1), k, v, ids, rows.first_key, rows.num_visible, problem.BS
    )
    expected = selected_attention.forward(
        q, k[None], v[None], ids, rows, block_size=problem.BS, scale=problem.D**-0.5
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs.flatten(0, 1), rtol=1e-4, atol=1e-5)


def with_powers_of_two(q, k, v, block_indices, first_key, num_visible, block_size):
    """Another way: a kernel in the function, powers of two, a pointer for each key, and the log at
    the end."""

    @triton.jit
    def walk(Q, K, V, Ids, First, Seen, Out, L, scale, S, H: tl.constexpr, G: tl.constexpr,
             GT: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr):  # fmt: skip
        r, h = tl.program_id(1), tl.program_id(0)
        g = tl.arange(0, GT)
        rows = (r * H + h) * G + tl.where(g < G, g, 0)  # idle rows load the first head
        q = tl.load(Q + rows[:, None] * D + tl.arange(0, D)[None]) * (scale * 1.44269504)
        m = tl.full([GT], -1e30, tl.float32)
        n = tl.zeros([GT], tl.float32)
        o = tl.zeros([GT, DV], tl.float32)
        for s in range(S):
            i = tl.load(Ids + (r * H + h) * S + s)
            if i >= 0:
                t = i * BS + tl.arange(0, BS)
                seen = t < tl.load(Seen + r)
                at = ((tl.load(First + r) + t) * H + h)[:, None]
                k = tl.load(K + at * D + tl.arange(0, D), mask=seen[:, None], other=0)
                v = tl.load(V + at * DV + tl.arange(0, DV), mask=seen[:, None], other=0)
                x = tl.dot(q, tl.trans(k), input_precision="ieee") + tl.where(seen, 0, -1e38)
                top = tl.maximum(m, tl.max(x, 1))
                w = tl.exp2(x - top[:, None])
                n = n * tl.exp2(m - top) + tl.sum(w, 1)
                o = o * tl.exp2(m - top)[:, None] + tl.dot(w, v, input_precision="ieee")
                m = top
        nothing = m == -1e30
        n = tl.where(nothing, 1, n)
        at = Out + rows[:, None] * DV + tl.arange(0, DV)
        tl.store(at, tl.where(nothing[:, None], 0, o / n[:, None]), mask=(g < G)[:, None])
        log = (m + tl.log2(n)) * 0.69314718
        tl.store(L + rows, tl.where(nothing, float("-inf"), log), mask=g < G)

    R, HQ, D = q.shape
    H, DV = v.shape[1:]
    o, lse = torch.zeros(R, HQ, DV, device=q.device), torch.ones(R, HQ, device=q.device)
    walk[(H, R)](
        q, k, v, block_indices, first_key, num_visible, o, lse, D**-0.5, block_indices.shape[2],
        H=H, G=HQ // H, GT=triton.next_power_of_2(HQ // H), D=D, DV=DV, BS=block_size,
    )  # fmt: skip
    return [o, lse]


@needs_triton
def test_a_kernel_of_another_form_holds_all_stages() -> None:
    verdict = judge(EXERCISES[BUILD], with_powers_of_two)
    assert verdict.lead == "All 9 stages hold.", verdict.text


@pytest.mark.exhaustive
@needs_triton
def test_the_output_alone_holds_all_stages_but_lse() -> None:
    verdict = judge(EXERCISES[BUILD], lambda *given: solution(BUILD)(*given)[0])
    assert verdict.lead == "8 of 9 stages hold." and "`return o, lse`" in verdict.text


def through_the_operator(q, k, v, block_indices, first_key, num_visible, block_size):
    from nsa_tutorial.kernels.triton.selected import forward

    rows = selected_attention.QueryRows(first_key, num_visible, num_visible - 1)
    tensors = (x[None] for x in (q, k, v))
    o, lse = forward.launch(
        *tensors, block_indices, rows, block_size=block_size, scale=q.shape[-1] ** -0.5
    )
    return o[0], lse[0]


@needs_triton
def test_the_course_s_own_kernel_is_no_answer() -> None:
    verdict = judge(EXERCISES[BUILD], through_the_operator)
    assert verdict.held == 0 and "the course's own function" in verdict.text


@needs_triton
def test_a_kernel_in_place_of_its_launch_is_told() -> None:
    assert "hand over the function" in judge(EXERCISES[BUILD], chapter_11.attend_to_list).text


# The solution's masks, and what becomes of them: the stage that refuses it, and its name.
IDLE_Q = {
    "tl.load(Q + rows * D + width, mask=in_group, other=0.0)": "tl.load(Q + rows * D + width)"
}
IDLE_STORES = {
    "acc_o / total[:, None], mask=in_group)": "acc_o / total[:, None])",
    ", mask=group < G)": ")",
}
BY_LUCK = {
    "no mask of the group at all": (IDLE_Q | IDLE_STORES, "a group of 3", "storing the padding"),
    "no mask on the stores": (IDLE_STORES, "a group of 3", "storing the padding"),
    "no mask on Q": (IDLE_Q, "a group of 3", "loading the idle rows of Q"),
    "no mask on the keys": (
        {"k_offset, mask=is_seen[:, None], other=0.0)": "k_offset)"},
        "-1 in the list",
        "loading the keys without a mask",
    ),
    "no `other` for the values": (
        {"v_offset, mask=is_seen[:, None], other=0.0)": "v_offset, mask=is_seen[:, None])"},
        "the future",
        "values loaded without `other`",
    ),
    "no precision": (
        {', input_precision="ieee"': ""}, "one block", "a dot that rounds its inputs to TF32",
    ),
    "no transposition": ({"k_tile.T": "k_tile"}, "one block", "a dot without the transposition"),
}  # fmt: skip


@pytest.mark.exhaustive
@needs_triton
@pytest.mark.parametrize(("edits", "stage", "mistake"), BY_LUCK.values(), ids=BY_LUCK)
def test_numbers_that_are_right_by_luck_are_no_answer(
    edits: dict[str, str], stage: str, mistake: str
) -> None:
    """What an interpreter forgives and a GPU does not; whatever is stored, NaN too."""
    parts = chapter_11.attend_to_list.fn, solution(BUILD)
    source = "\n".join(map(inspect.getsource, parts))
    for old, new in edits.items():
        assert old in source
        source = source.replace(old, new)
    verdict = judge(EXERCISES[BUILD], in_a_cell(source, BUILD))
    stages = [s.name for s in EXERCISES[BUILD].stages]
    assert stages[verdict.held] == stage and verdict.misconceptions == (mistake,), verdict.text


@needs_triton
def test_what_is_stored_outside_is_told() -> None:
    """A store past the end of a tensor that the attempt made is told in a sentence."""
    (case, *_) = next(s.cases for s in EXERCISES[BUILD].stages if s.name == "a group of 3")
    *_, wrong = (m for m in EXERCISES[BUILD].misconceptions if m.name == "storing the padding")
    run = chapter_11._run_attention
    run(solution(BUILD), *case.arguments())
    with pytest.raises(chapter_11.StoresElsewhere, match=f"stored {13 * 64} more"):
        run(wrong.wrong, *case.arguments())


@needs_triton
def test_a_mask_of_two_conditions_is_a_mask() -> None:
    """The interpreter makes integers of `&`. The kernel is right, and loads 3 numbers of 8."""

    @triton.jit
    def first_ones(X, Y, N):
        i = tl.arange(0, 8)
        mask = (i >= 0) & (i < N)
        tl.store(Y + i, tl.load(X + i, mask=mask), mask=mask)

    x, y = torch.ones(3), torch.zeros(3)
    with watching(unset=torch.nan) as seen:
        first_ones[1,](x, y, 3)
    assert not seen.faults and (seen.loads, seen.stores) == (3, 3)
    assert y.tolist() == [1.0] * 3


def test_phases_are_those_of_the_twin() -> None:
    kernel = "nsa_tutorial.kernels.triton.selected.forward:kernel"
    assert (
        phases(kernel)
        == phases(selected_attention.forward)
        == phases("nsa_tutorial.kernels.tilelang.selected.forward:build_kernel")
    )


# -- what the tutor says --


def gated_but_not_ended(ids: list, first_key: int, num_visible: int, BS: int) -> torch.Tensor:
    block_id = torch.tensor(ids)[:, None]
    return torch.where(block_id >= 0, first_key + block_id * BS + torch.arange(BS), -1)


def rows_beside_a_count(ids: list, first_key: int, num_visible: int, BS: int) -> torch.Tensor:
    block_id = torch.tensor(ids)[:, None]
    rows = first_key + block_id * BS + torch.arange(BS)
    return torch.where((block_id >= 0) & (rows < num_visible), rows, -1)


def ended_but_not_gated(ids: list, first_key: int, num_visible: int, BS: int) -> torch.Tensor:
    keys = torch.tensor(ids)[:, None] * BS + torch.arange(BS)
    return torch.where(keys < num_visible, first_key + keys, -1)


def without_empty_slots(ids: list, first_key: int, num_visible: int, BS: int) -> torch.Tensor:
    return key_by_key([block_id for block_id in ids if block_id >= 0], first_key, num_visible, BS)


def key_by_key(ids: list, first_key: int, num_visible: int, BS: int) -> torch.Tensor:
    rows = torch.full((len(ids), BS), -1.0)
    for slot, block_id in enumerate(ids):
        if block_id < 0:
            break
        for key in range(block_id * BS, min((block_id + 1) * BS, num_visible)):
            rows[slot, key - block_id * BS] = first_key + key
    return rows


def framed(is_loaded: str, rows: str) -> Callable:
    """`key_rows` with the two gaps of its frame filled."""
    source = cell("def key_rows")
    assert source.count("torch.as_tensor(...)") == source.count("rows = ...") == 1
    source = source.replace("torch.as_tensor(...)", f"torch.as_tensor({is_loaded})")
    namespace = {"torch": torch}
    exec(source.replace("rows = ...", f"rows = {rows}"), namespace)
    return namespace["key_rows"]


FRAMED = {
    "the slot alone": ("block_id >= 0", "first_key + block_id * BS + tokens"),
    "a token as a key": (
        "(block_id >= 0) & (tokens < num_visible)",
        "first_key + block_id * BS + tokens",
    ),
    "block 0 as an empty slot": (
        "(block_id > 0) & (block_id * BS + tokens < num_visible)",
        "first_key + block_id * BS + tokens",
    ),
    "an id as a start in the mask": (
        "(block_id >= 0) & (block_id + tokens < num_visible)",
        "first_key + block_id * BS + tokens",
    ),
    "an id as a start": (
        "(block_id >= 0) & (block_id * BS + tokens < num_visible)",
        "first_key + block_id + tokens",
    ),
    "the end alone": (
        "block_id * BS + tokens < num_visible",
        "first_key + block_id * BS + tokens",
    ),
    "a row as a key": (
        "(block_id >= 0) & (first_key + block_id * BS + tokens < num_visible)",
        "first_key + block_id * BS + tokens",
    ),
    "no first key": (
        "(block_id >= 0) & (block_id * BS + tokens < num_visible)",
        "block_id * BS + tokens",
    ),
    "no start in the row": (
        "(block_id >= 0) & (block_id * BS + tokens < num_visible)",
        "first_key + tokens",
    ),
    "a key too many": (
        "(block_id >= 0) & (block_id * BS + tokens <= num_visible)",
        "first_key + block_id * BS + tokens",
    ),
}
FRAMED_MISTAKES = dict(
    zip(
        FRAMED,
        (
            "loading whatever the list names",
            "counting a token in its block",
            "taking block 0 for an empty slot",
            "counting ids in tokens",
            "counting ids in tokens",
            "loading the keys of an empty slot",
            "comparing a row of K with a count of the sequence",
            "forgetting where the sequence begins",
            "forgetting where the block begins",
            "seeing one key too many",
        ),
        strict=True,
    )
)


@pytest.mark.parametrize("gaps", FRAMED)
def test_a_wrong_gap_of_the_frame_is_named(gaps: str) -> None:
    attempt = framed(*FRAMED[gaps])
    assert judge(EXERCISES["key_rows"], attempt).misconceptions == (FRAMED_MISTAKES[gaps],)


def test_the_frame_waits_for_its_reader() -> None:
    e = EXERCISES["key_rows"]
    rows = "first_key + block_id * BS + tokens"
    assert judge(e, framed("...", "...")).outcome == "not attempted"
    assert "A `...` still stands here" in judge(e, framed("tokens >= 0", "...")).text
    right = "block_id >= 0 and block_id * BS + tokens < num_visible"
    assert judge(e, framed(right, rows)).outcome == "right"


def test_who_takes_a_list_for_a_tensor_is_told() -> None:
    for name, attempt in (
        ("key_rows", lambda ids, first_key, num_visible, BS: ids[:, None]),
        ("key_rows", lambda ids, first_key, num_visible, BS: ids >= 0),
        ("locate", lambda cu_seqlens: cu_seqlens.diff()),
        ("locate", lambda cu_seqlens: cu_seqlens[1:] - cu_seqlens[:-1]),
    ):
        (taken, *_) = inspect.signature(attempt).parameters
        assert f"`torch.tensor({taken})` makes a tensor" in judge(EXERCISES[name], attempt).text
    misspelt = judge(EXERCISES["locate"], lambda cu_seqlens: cu_seqlens + torch.zeros(1).nothing)
    assert "makes a tensor" not in misspelt.text


def from_the_end(ids: list, num_blocks: int) -> int:
    walked = len(ids)
    while walked and ids[walked - 1] == -1:
        walked -= 1
    return walked


def the_slot(ids: list, num_blocks: int) -> int:
    return max((slot for slot, b in enumerate(ids) if 0 <= b < num_blocks), default=0)


def past_the_largest_id(ids: list, num_blocks: int) -> int:
    return max(ids) + 1


def any_id_below(ids: list, num_blocks: int) -> int:
    walked = 0
    for s, b in enumerate(ids):
        if b < num_blocks:
            walked = s + 1
    return walked


def slots_that_matter(ids: list, num_blocks: int) -> list:
    return [s for s, b in enumerate(ids) if 0 <= b < num_blocks]


def blocks_that_matter(ids: list, num_blocks: int) -> list:
    return [b for b in ids if 0 <= b < num_blocks]


def broken_off(ids: list, num_blocks: int) -> int:
    for s, b in enumerate(ids):  # noqa: B007 - a reader's loop, whose number is used behind it
        if not 0 <= b < num_blocks:
            break
    return s + 1


def appended(cu_seqlens: list) -> tuple:
    first_key, num_visible = [], []
    for start, end in pairwise(cu_seqlens):
        first_key.append([start] * (end - start))
        num_visible.append(list(range(1, end - start + 1)))
    return first_key, num_visible


def appended_once(cu_seqlens: list) -> tuple:
    first_key, _ = appended(cu_seqlens)
    return first_key, [n for length in map(len, first_key) for n in range(1, length + 1)]


def by_search(cu_seqlens: list) -> tuple:
    token, cu = torch.arange(cu_seqlens[-1]), torch.tensor(cu_seqlens)
    start = cu[torch.searchsorted(cu, token) - 1]
    return start.tolist(), (token - start + 1).tolist()


def in_pairs(cu_seqlens: list) -> list:
    return [
        (start, t - start + 1) for start, end in pairwise(cu_seqlens) for t in range(start, end)
    ]


def as_tensors(cu_seqlens: list) -> tuple:
    token, cu = torch.arange(cu_seqlens[-1]), torch.tensor(cu_seqlens)
    start = cu[torch.searchsorted(cu, token, right=True) - 1]
    return start, token - start + 1


def counts_first(cu_seqlens: list) -> tuple:
    return as_tensors(cu_seqlens)[::-1]


def count_of_a_sequence(cu_seqlens: list) -> tuple:
    lengths = [end - start for start, end in pairwise(cu_seqlens)]
    return as_tensors(cu_seqlens)[0].tolist(), lengths


def test_tensors_are_lists_of_numbers_too() -> None:
    assert judge(EXERCISES["locate"], as_tensors).outcome == "right"


def counted_short(cu_seqlens: list) -> tuple:
    first_key, num_visible = [], []
    for start, end in pairwise(cu_seqlens):
        first_key += [start] * (end - start)
        num_visible += range(1, end - start)
    return first_key, num_visible


def both_short(cu_seqlens: list) -> tuple:
    first_key, num_visible = [], []
    for start, end in pairwise(cu_seqlens):
        for n in range(1, end - start):
            first_key.append(start)
            num_visible.append(n)
    return first_key, num_visible


def end_first(cu_seqlens: list) -> tuple:
    first_key, num_visible = [], []
    for start, end in pairwise(cu_seqlens):
        first_key += [end] * (end - start)
        num_visible += range(1, end - start + 1)
    return first_key, num_visible


def count_before_row(position: int, first_key: int, window_size: int, BS: int) -> tuple:
    start = max(position + 1 - window_size, 0)
    return position + 1 - start, first_key + start, -(-(position + 1 - start) // BS)


def row_not_clamped(position: int, first_key: int, window_size: int, BS: int) -> tuple:
    num_visible = min(position + 1, window_size)
    return first_key + position + 1 - window_size, num_visible, -(-num_visible // BS)


def not_clamped(position: int, first_key: int, window_size: int, BS: int) -> tuple:
    return first_key + position - window_size + 1, window_size, -(-window_size // BS)


def touched(position: int, first_key: int, window_size: int, BS: int) -> tuple:
    start = max(position + 1 - window_size, 0)
    return first_key + start, position + 1 - start, position // BS - start // BS + 1


def steps(position: int, first_key: int, window_size: int, BS: int) -> tuple:
    start = max(position + 1 - window_size, 0)
    return first_key + start, position - start, -(-(position - start) // BS)


TYPED = [
    ("key_rows", gated_but_not_ended, "loading whatever the list names"),
    (
        "key_rows",
        rows_beside_a_count,
        "comparing a row of K with a count of the sequence",
    ),
    (
        "key_rows",
        ended_but_not_gated,
        "loading the keys of an empty slot",
    ),
    ("key_rows", without_empty_slots, "leaving out the rows of empty slots"),
    ("key_rows", key_by_key, "stopping at the first empty slot"),
    ("walked_slots", from_the_end, "walking up to blocks of the future"),
    (
        "walked_slots",
        the_slot,
        "the number of the last slot in place of how many there are",
    ),
    ("walked_slots", past_the_largest_id, "mixing up blocks and slots"),
    ("walked_slots", any_id_below, "taking an empty slot for a visible block"),
    ("walked_slots", slots_that_matter, "a list in place of a number"),
    ("walked_slots", blocks_that_matter, "a list in place of a number"),
    ("walked_slots", broken_off, "counting the slot that ended the loop"),
    ("locate", appended, "a list of lists"),
    ("locate", appended_once, "a list of lists"),
    ("locate", by_search, "giving a boundary's token to the sequence before it"),
    ("locate", in_pairs, "a list of pairs in place of two lists"),
    ("locate", counts_first, "the right numbers in another order"),
    ("locate", count_of_a_sequence, "one count for each sequence"),
    ("locate", counted_short, "stopping before a sequence's last token"),
    ("locate", both_short, "stopping before a sequence's last token"),
    ("locate", end_first, "the next sequence's first key in place of its own"),
    ("window_row", row_not_clamped, "a row before the sequence, beside the right count"),
    ("window_row", count_before_row, "the right numbers in another order"),
    ("window_row", not_clamped, "reaching back before the tensor"),
    ("window_row", touched, "counting the sequence's blocks that the window touches"),
    ("window_row", steps, "counting steps in place of keys"),
]


@pytest.mark.parametrize(
    ("name", "typed", "mistake"),
    TYPED,
    ids=[f"{name}-{typed.__name__}" for name, typed, _ in TYPED],
)
def test_what_a_reader_would_type_is_recognised(name: str, typed: Callable, mistake: str) -> None:
    assert judge(EXERCISES[name], typed).misconceptions == (mistake,)


def one_gap_left(ids: list, first_key: int, num_visible: int, BS: int) -> torch.Tensor:
    is_loaded = torch.arange(BS) < num_visible
    return torch.stack([torch.where(is_loaded, ..., -1) for _ in ids])


def test_a_gap_that_is_left_is_told_before_what_torch_takes() -> None:
    told = judge(EXERCISES["key_rows"], one_gap_left).text
    assert "A `...` still stands here" in told and "Tensor condition" not in told


def added_as_numbers(cu_seqlens: list) -> tuple:
    first_key, num_visible = [], []
    for start, end in pairwise(cu_seqlens):
        for token in range(start, end):
            first_key += start
            num_visible += token - start + 1
    return first_key, num_visible


def test_a_number_that_is_added_to_a_list_is_told() -> None:
    assert "`append` takes one number" in judge(EXERCISES["locate"], added_as_numbers).text


def test_whole_numbers_are_shown_as_such() -> None:
    """`key_rows` gives rows of K, not decimals."""
    assert "expected [[ 0,  1],\n" in judge(EXERCISES["key_rows"], key_by_key).text


def test_thoughts_about_guesses_hold() -> None:
    known = {p.name: [guess for guess, _ in p.thoughts] for p in chapter_11.PREDICTIONS}
    elements = 4 * 16 * 128
    assert 65536 * elements == 2**29 and 65536 * elements * 4 == 2**31, "the bytes of fp32"
    assert {2**32 // elements, 2**31 // (2 * elements), 2**31 // (4 * 128), 2**31 // 128} <= set(
        known["first_token_past_int32"]
    )
    ms = {name: row["ms"] for name, row in pictures.times().items()}
    one_by_one = [ms[f"pointers, {change}"] for change in ("steps of 64 tokens", "4 warps")]
    assert one_by_one[0] > one_by_one[1] > ms["pointers, 1 stage"]
    assert round(one_by_one[1]) == 20
    (worst,) = (p for p in chapter_11.PREDICTIONS if p.name == "worst_change")
    took = f"{one_by_one[0]:.1f} ms in place of {ms['pointers']:.1f}"
    assert worst.reason == f"Steps of 64 tokens take {took}."
    assert 1.2 < ms["pointers, 1 stage"] / ms["pointers"] < 1.3, "a quarter more"


def test_a_share_in_place_of_a_count_is_answered() -> None:
    (asked,) = (p for p in chapter_11.PREDICTIONS if p.name == "nan_answers")
    told = [thought for guess, thought in asked.thoughts if callable(guess) and guess(0.5)]
    assert len(told) == 1 and "share" in told[0]
    assert not any(guess(2.0) for guess, _ in asked.thoughts if callable(guess))


def test_a_formula_in_quotes_is_answered() -> None:
    (asked,) = (p for p in chapter_11.PREDICTIONS if p.name == "first_token_past_int32")
    told = [thought for guess, thought in asked.thoughts if callable(guess) and guess("2**31/8192")]
    assert len(told) == 1 and "quotes" in told[0]


# -- the kernel in the cell --


def cell(beginning: str) -> str:
    """The chapter's cell whose source begins so."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    (found,) = (s for c in cells if (s := "".join(c["source"])).startswith(beginning))
    return found


def in_a_cell(source: str, name: str = "first_scores") -> Callable:
    """A function as a cell defines it."""
    file = f"<cell {hash(source)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace = {"tl": tl, "triton": triton, "Tensor": torch.Tensor}
    exec(compile(source, file, "exec", dont_inherit=True), namespace)
    return namespace[name]


def mended(**lines: str) -> Callable:
    """The chapter's kernel with what stands right of `=` changed, by name."""
    source = cell("def first_scores")
    for name, new in lines.items():
        assert f"        {name} = " in source
        source = re.sub(rf"^(        {name} = ).*$", rf"\g<1>{new}", source, flags=re.M)
    return in_a_cell(source)


ROW, MASK = "(query * H + head) * G + group", "group < G"
HALF = {
    "the mask alone": ({"in_group": MASK}, "too short a step from query to query"),
    "the row alone": ({"group_row": ROW}, "storing the padding"),
    "<=": ({"group_row": ROW, "in_group": "group <= G"}, "storing one row of the padding"),
    "of the tensor": (
        {
            "group_row": ROW,
            "in_group": "group + (query * H + head) * G < tl.num_programs(0) * H * G",
        },
        "masking nothing but the tensor's end",
    ),
    "the tile's rows": (
        {"group_row": "(query * H + head) * GT + group", "in_group": MASK},
        "padding the tensor as well as the tile",
    ),
    "elements": (
        {"group_row": "(query * H + head) * G * D + group", "in_group": MASK},
        "counting elements in place of pieces",
    ),
    "without the query": (
        {"group_row": "head * G + group", "in_group": MASK},
        "leaving out the query",
    ),
    "without H": (
        {"group_row": "query * G + head * G + group", "in_group": MASK},
        "counting one group for each query",
    ),
    "H for G": (
        {"group_row": ROW, "in_group": "group < H"},
        "comparing with the number of KV heads",
    ),
    "D for G": (
        {"group_row": ROW, "in_group": "group < D"},
        "comparing with the width of a head",
    ),
    "all heads of the query": (
        {"group_row": ROW, "in_group": "group < H * G"},
        "comparing with the number of all query heads",
    ),
}


@needs_triton
@pytest.mark.parametrize(("lines", "mistake"), HALF.values(), ids=HALF)
def test_a_half_mended_kernel_is_named(lines: dict[str, str], mistake: str) -> None:
    assert judge(EXERCISES["first_scores"], mended(**lines)).misconceptions == (mistake,)


@needs_triton
def test_one_place_for_all_rows_is_told() -> None:
    attempt = mended(group_row="query * H * G + head * G", in_group=MASK)
    assert "What is missing?" in judge(EXERCISES["first_scores"], attempt).text


@needs_triton
def test_a_load_past_the_end_is_no_right_answer() -> None:
    """The store has a mask of its own, so every number is right."""
    source = cell("def first_scores").replace("query * H + head * G + group", ROW)
    assert source.count("mask=in_group)") == 1
    attempt = in_a_cell(source.replace("mask=in_group)", f"mask={MASK})"))
    found = judge(EXERCISES["first_scores"], attempt).misconceptions
    assert found == ("masking the store alone",)


@needs_triton
def test_a_store_at_the_beginning_is_named() -> None:
    source = cell("def first_scores").replace("query * H + head * G + group", ROW)
    source = source.replace("group < GT", MASK)
    attempt = in_a_cell(source.replace("tl.store(Score + group_row", "tl.store(Score + group"))
    found = judge(EXERCISES["first_scores"], attempt)
    assert found.misconceptions == ("storing at the beginning of `Score`",)
    assert "H = 1, G = 3, GT = 16" in found.text and "`Score`:\ngot" in found.text


@needs_triton
@pytest.mark.parametrize("key", ["query", "(query * H + head)", "head * G"])
def test_another_key_is_named(key: str) -> None:
    source = cell("def first_scores").replace("query * H + head * G + group", ROW)
    source = source.replace("group < GT", MASK)
    attempt = in_a_cell(source.replace("K + head * D", f"K + {key} * D"))
    found = judge(EXERCISES["first_scores"], attempt)
    assert found.misconceptions == ("a key that is not the KV head's",)


@needs_triton
def test_a_word_that_the_recorder_does_not_know_is_no_mistake() -> None:
    unknown = mended(group_row=f"tl.broadcast_to({ROW}, [GT])", in_group=MASK)
    assert judge(EXERCISES["first_scores"], unknown).outcome == "right"


@needs_triton
@pytest.mark.parametrize(
    "row", [ROW, "query * H * G + head * G + group", "G * (head + H * query) + group"]
)
def test_ways_to_mend_the_kernel(row: str) -> None:
    assert judge(EXERCISES["first_scores"], mended(group_row=row, in_group=MASK)).outcome == "right"


@needs_triton
def test_the_kernel_in_the_cell_waits_for_its_reader() -> None:
    e, given = EXERCISES["first_scores"], cell("def first_scores")
    assert judge(e, in_a_cell(given)).outcome == "not attempted"
    assert judge(e, in_a_cell(given.replace("# [GT]", "# which"))).outcome == "not attempted"


def test_the_kernel_that_is_given_differs_from_the_solution_in_two_lines() -> None:
    given = {line.strip() for line in cell("def first_scores").splitlines()[1:]}
    ours = {line.strip() for line in inspect.getsource(chapter_11.first_scores).splitlines()}
    assert {line.split(" = ")[0] for line in given - ours} == {"in_group", "group_row"}


@needs_triton
def test_what_is_no_kernel_is_told() -> None:
    def forgotten() -> None:
        def kernel(Q: object) -> object:
            return Q

    e = EXERCISES["first_scores"]
    for attempt, told in ((lambda: 3, "@triton.jit"), (forgotten, "return kernel")):
        assert told in judge(e, attempt).text
    assert "hand over the function" in judge(e, chapter_11.first_scores()).text
