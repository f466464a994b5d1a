"""Chapter 10's frame: the tracer, one program block by block, what was stored about CUDA text and
times, the exercises' draft."""

from __future__ import annotations

import json
import linecache
import logging
import math
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, groupby, pairwise
from pathlib import Path

import judged
import numpy as np
import pytest
import torch

from nsa_tutorial import ops
from nsa_tutorial.course import exercises, phases, show
from nsa_tutorial.course.attempts import Raised
from nsa_tutorial.course.diffs import Edited, together
from nsa_tutorial.course.exercises import tilelang_forward as chapter
from nsa_tutorial.course.judging import judge
from nsa_tutorial.course.languages import T
from nsa_tutorial.course.trace import trace
from nsa_tutorial.course.values import difference, same
from nsa_tutorial.course.widgets import tilelang_forward as pictures
from nsa_tutorial.runtime import environment, lowering
from nsa_tutorial.sparse import selected_attention

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "10_tilelang_forward.ipynb"
needs_tilelang = pytest.mark.skipif(
    environment.detect().why_not("tilelang", "cpu") is not None,
    reason="TileLang does not run on this CPU",
)


EXERCISES = exercises.chapter_exercises("tilelang_forward")


def prose() -> str:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    return " ".join(" ".join(sources).split())


# -- the tracer --


def walk(values: list[int], stop: int = 10) -> int:
    """A function with phases before, in and after loops and branches."""
    # -- begin --
    total = 0
    kept = torch.zeros(1)
    for value in values:
        # -- add --
        total += value
        kept += value

        if total > stop:
            # -- too much --
            total = stop
        # -- count --
        kept = kept * 1
    # -- end --
    total *= 2
    return total


def test_trace_sees_the_end_of_every_phase() -> None:
    found = trace(walk, [1, 2, 30])
    assert found.result == walk([1, 2, 30]) == 20
    assert [(s.phase, s.turn) for s in found.steps] == [
        ("begin", 0), ("add", 0), ("count", 0), ("add", 1), ("count", 1), ("add", 2),
        ("too much", 0), ("count", 2), ("end", 0)
    ]  # fmt: skip
    assert [found.at("add", turn)["total"] for turn in range(3)] == [1, 3, 33]
    assert found.at("too much")["total"] == 10
    assert found.at("end")["total"] == 20
    assert found.turns == 3


def test_trace_keeps_copies() -> None:
    """A tensor that is written to in place later on stays as it was when a phase ended."""
    found = trace(walk, [1, 2, 30])
    assert [found.at("add", turn)["kept"].item() for turn in range(3)] == [1, 3, 33]
    assert found.at("end")["kept"] is found.at("count", 2)["kept"], (
        "what has not changed is not copied again"
    )


def branch(x: int) -> str:
    if x > 0:
        # -- above --
        told = "above"
    else:
        told = "below"
        # -- below --
        told = told.upper()
    # -- tell --
    return told


@pytest.mark.parametrize(("x", "seen"), [(1, ["above", "tell"]), (-1, ["below", "tell"])])
def test_trace_takes_one_branch(x: int, seen: list[str]) -> None:
    """No docstring, and a phase that begins in one branch is none of the other's."""
    found = trace(branch, x)
    assert [step.phase for step in found.steps] == seen
    assert found.result == branch(x)


def test_trace_errors() -> None:
    with pytest.raises(
        ValueError,
        match=r"no turn 3 of a phase 'add'; the phases are 'begin', 'add', .*, with up to 3 turns",
    ):
        trace(walk, [1, 2, 30]).at("add", 3)
    with pytest.raises(ValueError, match="math_free has no phases"):
        trace(math_free, 2)


def math_free(x: int) -> int:
    return x + 1


def test_trace_reports_the_lines_of_the_file() -> None:
    with pytest.raises(TypeError) as caught:
        trace(walk, ["a"])
    entry = caught.traceback[-1]
    assert Path(str(entry.path)).name == Path(__file__).name
    assert "total += value" in Path(__file__).read_text().splitlines()[entry.lineno]


@pytest.mark.parametrize("S", [1, 3])
def test_trace_of_the_twin(S: int) -> None:
    """Same result as the plain call, and each phase of the loop once for each slot."""
    g = torch.Generator().manual_seed(S)
    q, k, v = (torch.randn(1, 7, n, d, generator=g) for n, d in ((6, 4), (2, 4), (2, 5)))
    rows = selected_attention.query_rows(1, 7, 7, causal=True, cu_seqlens=None, device=q.device)
    ids = torch.randint(-1, 3, (7, 2, S), generator=g, dtype=torch.int32)
    options = {"block_size": 3, "scale": 0.7}
    found = trace(selected_attention.forward, q, k, v, ids, rows, **options)
    assert same(found.result, selected_attention.forward(q, k, v, ids, rows, **options), 0.0)
    assert list(dict.fromkeys(step.phase for step in found.steps)) == phases(
        selected_attention.forward
    )
    assert found.turns == S
    assert torch.equal(
        found.at("online softmax", S - 1)["running_sum"],
        found.at("normalise and store")["running_sum"],
    )


# -- one program, block by block --


@needs_tilelang
def test_the_trace_ends_where_the_kernel_does() -> None:
    from nsa_tutorial.kernels.tilelang.selected import launch as tilelang_launch

    e = pictures.example()
    sizes = {"block_size": pictures.BS, "scale": e.scale}
    found = tilelang_launch.selected_forward(e.q, e.k, e.v, e.ids, e.rows, **sizes)
    torch.testing.assert_close(found, pictures.stepper().result, rtol=1e-5, atol=1e-5)


def test_the_stepper_is_selected_attention() -> None:
    e = pictures.example()
    N, H = e.q.shape[1], e.k.shape[2]
    ids = e.ids.reshape(1, N, H, pictures.S)
    expected = ops.selected_attention(
        e.q, e.k, e.v, ids, block_size=pictures.BS, return_lse=True, backend="reference"
    )
    torch.testing.assert_close(pictures.stepper().result, expected)


@pytest.mark.parametrize(("token", "head"), [(77, 0), (20, 3), (0, 1)])
def test_moments_add_up(token: int, head: int) -> None:
    """Maximum, denominator and accumulator of each slot follow from those before and from the
    slot's scores and values."""
    e, G = pictures.example(), 4
    largest, total, acc = np.full(G, -np.inf), np.zeros(G), np.zeros((G, 32))
    for slot in range(pictures.S):
        m = pictures.moment(token, head, slot)
        assert np.isneginf(m.scores[:, ~m.is_seen]).all()
        assert (m.weights[:, ~m.is_seen] == 0).all()
        new = np.maximum(largest, m.scores.max(1))
        np.testing.assert_allclose(m.scores_max, new, rtol=1e-6)
        if np.isfinite(new).all():
            factor, weights = np.exp(largest - new), np.exp(m.scores - new[:, None])
            total, acc = total * factor + weights.sum(1), acc * factor[:, None] + weights @ m.v_tile
        largest = new
        np.testing.assert_allclose(m.running_sum, total, rtol=1e-4)
        np.testing.assert_allclose(m.acc_o, acc, rtol=1e-3, atol=1e-4)
        keys = m.block_id * pictures.BS + np.arange(pictures.BS)
        assert (m.is_seen == ((m.block_id >= 0) & (keys <= token))).all()
    o = pictures.stepper().result[0][0, token, head * G : (head + 1) * G].numpy()
    np.testing.assert_allclose(acc / total[:, None], o, rtol=1e-3, atol=1e-4)
    assert e.text[token : token + 1]


def test_step_pictures() -> None:
    picture = pictures.draw_step(77, 0, 0)
    assert picture.finding.startswith("token 77, KV head 0, slot 0: block 4, 14 of 16 keys seen")
    assert len(picture.png()) < 60_000
    assert pictures.draw_step(77, 0, 1).finding.endswith(
        "empty; nothing is loaded, nothing changes"
    )


def test_what_a_step_says() -> None:
    assert "slot 1: an empty slot. Nothing is seen" in pictures.sentence(77, 0, 1)
    assert pictures.sentence(token=0, head=2, slot=0).startswith(
        "Program (token 0, KV head 2), slot 0: block 0, keys 0 to 15, of which 1 is seen."
    )


# -- what was stored about the CUDA text --


def test_copies_follow_the_products_that_used_the_tile() -> None:
    """In the loop of the CUDA text: the next keys after the scores, the next values after the
    output."""
    if environment.detect().tilelang is None:
        pytest.skip("TileLang is not installed")
    from nsa_tutorial.kernels.tilelang.selected.forward import build_kernel

    text = lowering.cuda(build_kernel(4, 16, 128, 128, 64, "float16"))
    loop = text[text.index("for (int slot") :]
    found = [x for x, _ in groupby(re.findall(r"mma_sync|cp_async_gs|exp2f", loop))]
    turn = ["mma_sync", "cp_async_gs", "exp2f", "mma_sync", "cp_async_gs"]
    assert found[: len(turn)] == turn
    assert "There is room for one block." in prose()


def test_facts_of_the_cuda_text() -> None:
    """What the chapter says of it."""
    rows = {(row["kernel"], row["change"]): row for row in pictures.lowered()["rows"]}
    ours = rows["ours", ""]
    for change in ("exact exp2", "TMA off", "warp specialisation"):
        assert rows["ours", change]["sha256"] == ours["sha256"], "not a letter of the text changes"
    assert ours["counts"]["tma_load"] == ours["counts"]["mbarrier"] == 0
    assert ours["counts"]["cp_async_gs_conditional"] == 4
    assert rows["ours", "no bounds checks"]["counts"]["cp_async_gs_conditional"] == 2
    keys = (
        ("first draft", "2 stages"), ("ours", "no stage"),
        ("ours", "values through registers"), ("ours", ""),
    )  # fmt: skip
    copies = [rows[key]["counts"]["cp_async_gs"] for key in keys]
    assert copies == [0, 0, 2, 4], "the draft and the kernel without a stage wait for every copy"
    assert ours["excerpts"]["float acc_o"] == "float acc_o[64];"


@pytest.mark.parametrize(
    ("key", "stages", "extra", "fit"),
    [
        (("ours", ""), 1, 0, 6),
        (("first draft", "1 stage"), 1, 2048, 5),
        (("first draft", "2 stages"), 2, 2048, 3),
    ],
)
def test_shared_memory_is_what_the_exercise_computes(
    key: tuple, stages: int, extra: int, fit: int
) -> None:
    row = pictures.lowered_row(*key)
    programs_per_sm = exercises.chapter_exercises("tilelang_forward")["programs_per_sm"].solution
    size = sum(pictures.tiles(row).values())
    assert size - extra == programs_per_sm(16, 128, 128, 64, stages, 2)[0]
    assert pictures.SM_BYTES // (size + pictures.PROGRAM_BYTES) == fit
    assert f"{size // 1024} KiB" in prose()


def test_shared_and_fragment_pictures() -> None:
    assert (
        pictures.draw_shared().finding
        == "One block each: an SM holds 6 of our programs, 5 of the draft's; two blocks: 3"
    )
    owner = np.array(pictures.lowered()["owner"])
    assert (np.bincount(owner.flat) == 8).all() and len(np.unique(owner)) == 32
    assert (
        pictures.draw_fragment().finding
        == "Thread 5 holds 8 of these 256 scores; each row lies with 4 threads"
    )


@needs_tilelang
@pytest.mark.exhaustive
@pytest.mark.skipif(
    environment.detect().tilelang != pictures.lowered()["tilelang"],
    reason="another TileLang than the stored facts",
)
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=f"{row['kernel']} {row['change']}".strip())
        for row in pictures.lowered()["rows"]
    ],
)
def test_the_stored_facts_are_those_of_today(row: dict) -> None:
    from nsa_tutorial.runtime import lowering

    variant = (row["kernel"], row["change"])
    *_, function, pass_configs = next(v for v in pictures.variants() if v[:2] == variant)
    facts = pictures.facts(lowering.cuda(function, "sm_90", pass_configs))
    assert {"kernel": row["kernel"], "change": row["change"], **facts} == row


def test_the_minutes_are_told() -> None:
    """Three exercises are optional, and not among the chapter's minutes."""
    minutes = {name: e.minutes for name, e in EXERCISES.items()}
    optional = sum(minutes.pop(name) for name in ("is_seen", "normalise", "programs_per_sm"))
    assert f"{sum(minutes.values())} of them exercises" in prose()
    rest = prose().split("### If you have more time", 1)[1]
    parts = [int(told) for told in re.findall(r"\*\*\d\. [^*]*\((\d+) minutes\)\.?\*\*", rest)]
    assert len(parts) == 4 and sum(parts) > optional
    assert f"take about {sum(parts)} minutes more" in prose()
    assert f"Four parts, about {sum(parts)} minutes in all" in rest


# -- what was measured --


def test_the_stored_table() -> None:
    assert "--steps" in pictures.measured()["command"]
    for told in (pictures.measured(), pictures.measured(pictures.GROUPS)):
        assert re.fullmatch(r"python -m nsa_tutorial.bench selected [^/]*", told["command"]), (
            "no path of a machine"
        )
        assert "H200" in told["machine"]
        assert all(told[name] for name in ("python", "torch", "triton", "tilelang"))
        for row in told["rows"]:
            assert row["ms"] is not None, row["note"]
            assert row["is_right"] or row["kernel"].startswith("dense"), row["change"]
    assert {row["group"] for row in pictures.measured(pictures.GROUPS)["rows"]} == {4, 16}


def test_what_the_chapter_says_of_the_table() -> None:
    found = pictures.times()
    first, ours = found["first draft, mended, 2 stages"]["ms"], found["ours"]["ms"]
    assert f"it takes {first:.0f} milliseconds, and ours {ours:.0f}" in prose()
    chain = [found[change]["ms"] for change in pictures.CHAIN]
    assert all(later < 0.85 * earlier for earlier, later in pairwise(chain)), "each step pays"
    draft, one_stage, no_branch, view = chain
    assert f"**One stage ({draft:.1f} → {one_stage:.1f} ms).**" in prose()
    assert f"**No branch (→ {no_branch:.1f} ms).**" in prose()
    assert f"**A view for the values (→ {view:.1f} ms).**" in prose()
    stages = pictures.stage_times()
    assert stages[1] < stages[2] < stages[0] < stages[3]
    assert stages[1] == round(found["1 stage, number of slots fixed"]["ms"], 1)
    warps = [found[f"{n} threads"]["ms"] for n in (32, 64, 128, 256)]
    assert warps == sorted(warps)
    same = pictures.same_kernel()
    assert f"measured three times, took {min(same):.1f} to {max(same):.1f} ms" in prose()
    assert len(same) == 3


def test_what_the_chapter_says_of_loads_and_products() -> None:
    """What each kernel loads and computes, at the shape of the pictures."""
    ms = pictures.chain_times()
    ours = [*ms.values()][-1]
    loaded = 65_536 * 4 * 16 * 64 * 2 * 128 * 2  # bytes: queries, KV heads, blocks, tokens, k and v
    assert f"the same {loaded / 1e9:.0f} GB" in prose()
    assert f"{loaded / 1e9:.0f} GB in {ours:.1f} ms are {loaded / ours / 1e9:.1f} TB/s" in prose()
    assert loaded / 2 > 4.8e9 * ours, "more than half cannot have come from memory"
    products = 65_536 * 64 * 16 * 64 * 128 * 2 * 2 / 989e9  # ms at 989 TFLOP/s
    assert f"The products would take {products:.1f} ms at best" in prose()
    assert "probe" not in prose().split("<summary>How one would find out</summary>")[0]


def test_what_is_noise() -> None:
    """One CUDA text, measured again; a difference counts where it is larger than that, or there in
    every shape."""
    same, found = pictures.same_kernel(), pictures.times()
    assert same[0] == found["ours"]["ms"]
    ours = pictures.lowered_row("ours")
    assert pictures.lowered_row("ours", "TMA off")["sha256"] == ours["sha256"]
    changes = ("TMA off", "exact exp2", "weights through shared memory", "values through registers")
    noise, exact, weights, values = (pictures.ratios(change) for change in changes)
    assert len(noise) == len(exact) == len(weights) == len(values) == 4
    assert noise[0] < 1 < noise[-1], "noise goes both ways"
    assert exact[0] < 1 < exact[-1] < 1.02, "and fast math is no more than that"
    assert f"takes {values[0]:.2f} to {values[-1]:.2f} times as long" in prose()
    assert weights[0] > noise[-1] and values[0] > max(same) / min(same)


def test_the_step_without_a_branch_in_every_shape() -> None:
    """About a fifth, and more than the weights alone."""
    weights = pictures.ratios("weights through shared memory")[-1]
    for tokens in (65536, 8192):
        for width in (128, 64):
            found = pictures.times(tokens, width=width)
            before = found["first draft, mended, 1 stage"]["ms"]
            step = found["values through registers"]["ms"] / before
            assert 0.76 < step < 0.82 and 1 / step > weights


def test_groups_of_four() -> None:
    """The same time as groups of 16, for a quarter of the work."""
    four, sixteen = (pictures.times(group=group, path=pictures.GROUPS) for group in (4, 16))
    assert four["ours"]["kv_heads"] == sixteen["ours"]["kv_heads"] == 4
    assert abs(four["ours"]["ms"] / sixteen["ours"]["ms"] - 1) < 0.05
    assert four["dense, cuDNN"]["ms"] < 0.3 * sixteen["dense, cuDNN"]["ms"]
    assert pictures.times(8192, 4, path=pictures.GROUPS)["ours"]["dense_ratio"] < 1, (
        "and dense attention is faster there"
    )


def test_measurement_pictures() -> None:
    found = pictures.times()
    first, ours = found["first draft, mended, 2 stages"]["ms"], found["ours"]["ms"]
    chain, undone = pictures.draw_chain(), pictures.draw_undone()
    told = f"The same answer in {first:.1f} ms and in {ours:.1f} ms"
    assert chain.finding == f"{told}: {first / ours:.1f} times as fast"
    told = r"One decision undone at a time: with .+, \d\.\d times as long"
    assert re.match(told, undone.finding)
    for picture in (chain, undone, pictures.draw_shared(), pictures.draw_fragment()):
        assert len(picture.png()) < 60_000


# -- the first kernel --


def frame(**gaps: str) -> Callable:
    """The frame of the first exercise's cell, with its gaps filled: a condition, a start, a
    line."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = "".join(next(c["source"] for c in cells if c["id"] == "listed-stub"))
    filled = ("if ...:", "start = ...", "...  # 3")
    for gap, name in zip(filled, ("guard", "start", "line"), strict=True):
        assert code.count(gap) == 1
        if name in gaps:
            code = code.replace(gap, gap.replace("...", gaps[name]))
    file = f"<{' '.join(gaps.values())}>"
    linecache.cache[file] = (len(code), None, code.splitlines(True), file)
    names: dict = {"T": T}
    exec(compile(code, file, "exec", dont_inherit=True), names)
    return names["listed_attention"]


FILLED = {
    "guard": "Lists[t, slot] >= 0",
    "start": "Lists[t, slot] * BS",
    "line": "T.gemm(acc_s, v_tile, acc_o)",
}


@needs_tilelang
def test_the_frame_with_its_gaps_filled_is_right() -> None:
    e = EXERCISES["listed_attention"]
    assert judge(e, frame(**FILLED)).outcome == "right"
    assert judge(e, frame()).outcome == "not attempted"


@needs_tilelang
@pytest.mark.exhaustive
def test_another_guard_is_right_and_an_open_gap_is_told() -> None:
    e = EXERCISES["listed_attention"]
    assert judge(e, frame(**FILLED | {"guard": "Lists[t, slot] != -1"})).outcome == "right"
    assert "A `...` still stands here" in judge(e, frame(guard=FILLED["guard"])).text
    told = judge(e, frame(guard=FILLED["guard"], start=FILLED["start"])).misconception
    assert told == "leaving the weighted values out"


# the first runs in `make test`: each is a kernel of its own, which takes a second
FILLED_WRONGLY = [
    ("start", "Lists[t, slot]", "taking a block's number for a position"),
    ("guard", "Lists[t, slot] > 0", "taking block 0 for an empty slot"),
    ("line", "T.gemm(acc_s, k_tile, acc_o)", "weighting the keys in place of the values"),
    ("start", "slot * BS", "taking the slot for the block"),
    ("start", "slot", "taking the slot for the block"),
    ("start", "t * BS", "taking the query for the block"),
    ("start", "(Lists[t, slot] - 1) * BS", "counting blocks from 1"),
    ("start", "Lists[t, slot] * D", "multiplying a block's number by the width"),
    ("start", "Lists[t, slot] * S", "multiplying a block's number by the number of slots"),
    ("start", "Lists[slot, t] * BS", "the list's two indices in the other order"),
    ("guard", "Lists[t, slot] == -1", "an inverted condition"),
    ("guard", "Lists[slot, t] >= 0", "the list's two indices in the other order"),
    ("guard", "slot >= 0", "loading a block for an empty slot"),
    (
        "line",
        "T.gemm(acc_s, v_tile, acc_o, clear_accum=True)",
        "starting `acc_o` anew for each block",
    ),
    (
        "line",
        "T.clear(acc_o); T.gemm(acc_s, v_tile, acc_o)",
        "starting `acc_o` anew for each block",
    ),
]


@pytest.mark.exhaustive
@needs_tilelang
@pytest.mark.parametrize(
    ("gap", "typed", "mistake"),
    [
        pytest.param(*row, marks=[pytest.mark.exhaustive] if n else [])
        for n, row in enumerate(FILLED_WRONGLY)
    ],
)
def test_a_gap_filled_wrongly_is_named(gap: str, typed: str, mistake: str) -> None:
    e = EXERCISES["listed_attention"]
    assert judge(e, frame(**FILLED | {gap: typed})).misconception == mistake


@needs_tilelang
@pytest.mark.parametrize(
    ("gaps", "told"),
    [
        ({"line": "acc_s @ v_tile"}, "The product is `T.gemm(a, b, out)`"),
        ({"line": "acc_o += acc_s @ v_tile"}, "The product is `T.gemm(a, b, out)`"),
        ({"guard": "list[t, slot] >= 0"}, "The kernel's argument is `Lists`"),
        ({"start": "list[t, slot] * BS"}, "The kernel's argument is `Lists`"),
        ({"line": "T.gemm(v_tile, acc_s, acc_o)"}, "In which order do they fit"),
        ({"line": "T.gemm(acc_s, v_tile, acc_o, transpose_B=True)"}, "without a transpose?"),
        ({"line": "T.gemm(q_tile, v_tile, acc_o)"}, "The weights are in `acc_s`"),
        ({"line": "T.gemm(scores_sum, v_tile, acc_o)"}, "one of yours has a single axis"),
        ({"line": "acc_o += T.gemm(acc_s, v_tile)"}, "adds the product to its third argument"),
        ({"start": "Lists[t][slot] * BS"}, "two indices in one pair of brackets"),
        ({"guard": "T.infinity(accum_dtype) > 0"}, 'stands for the text "float32"'),
    ],
    ids=lambda value: next(iter(value.values())) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize(
    "known",
    [
        pytest.param({"misconceptions": ()}, id="alone"),
        pytest.param({}, id="beside all mistakes", marks=pytest.mark.exhaustive),
    ],
)
def test_an_error_in_a_gap_says_what_to_write(
    gaps: dict[str, str], told: str, known: dict[str, tuple]
) -> None:
    """And it is none of the known mistakes, nor two of them."""
    verdict = judge(replace(EXERCISES["listed_attention"], **known), frame(**FILLED | gaps))
    assert (verdict.outcome, verdict.misconceptions) == ("wrong", ())
    assert told in verdict.text and next(iter(gaps.values())) in verdict.text


@needs_tilelang
def test_each_mistake_in_the_first_kernel_is_named_as_itself() -> None:
    """One kernel holds them all, and is compiled once."""
    e = EXERCISES["listed_attention"]
    for known in e.misconceptions:
        assert judge(e, known.wrong).misconception == known.name


@needs_tilelang
def test_a_guard_that_is_a_number_is_told_so() -> None:
    e = EXERCISES["listed_attention"]
    e = replace(e, misconceptions=(), cases=e.cases[:1])  # each case compiles, and fails
    verdict = judge(e, frame(**FILLED | {"guard": "Lists[t, slot]"}))
    assert verdict.outcome == "wrong"
    assert "the guard is a number" in verdict.text


@needs_tilelang
def test_the_first_kernel_is_selected_attention() -> None:
    """Where blocks are whole, every key may be seen, and scores are small."""
    e = EXERCISES["listed_attention"]
    N, M, ids = 3, 12, [2, -1, 0]
    g = torch.Generator().manual_seed(N + M)  # as the exercise draws them
    q, k, v = (torch.randn(n, generator=g) for n in ((N, 2, 3), (M, 3), (M, 3)))
    lists = torch.tensor(ids, dtype=torch.int32).expand(1, N, 1, 3)
    expected = ops.selected_attention(
        q[None], k[None, :, None], v[None, :, None], lists, block_size=4, scale=1.0, causal=False
    )
    assert same(e.run(e.solution, N, M, ids), expected[0], 1e-5)


def test_the_whole_kernel_is_on_the_page() -> None:
    """Phase by phase, in the kernel's order, each of them once and not cut short."""
    kernel = "nsa_tutorial.kernels.tilelang.selected.forward:build_kernel"
    cells = [c for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code"]
    shown = "".join(
        "".join(output.get("data", {}).get("text/plain", ""))
        for cell in cells
        for output in cell["outputs"]
        if cell["id"].startswith("read-")
    )
    at = []
    for phase in phases(kernel):
        code = show(kernel, phase).code
        assert shown.count(code.strip()) == 1, phase
        at.append(shown.index(code.strip()))
    assert at == sorted(at)


@needs_tilelang
def test_the_largest_score_for_which_the_draft_is_right() -> None:
    """The guess's answer, and what the chapter says of the scores behind it."""
    found = {
        high: chapter.with_mistake("update_max", [high, high, 0, 0], [0, 1])
        for high in range(85, 90)
    }
    right = "should be [2.0, 3.0]"
    drafts = ("[2.0, 3.0]", "[2.0, 3.0]", "[2.0, inf]", "[inf, inf]", "[nan, nan]")
    assert [*found.values()] == [f"draft {draft}, {right}" for draft in drafts]
    assert 'reveal("largest_right_score", 86)' in NOTEBOOK.read_text().replace('\\"', '"')


@needs_tilelang
def test_where_the_first_kernel_is_right() -> None:
    told = [chapter.first_kernel_is_right(*run) for run in ((8, False), (7, False), (8, True))]
    assert told == [True, False, False]


@pytest.mark.parametrize("name", ["update_max", "is_seen", "normalise"])
def test_a_wrong_piece_does_not_tell_its_mistake(name: str) -> None:
    """The code is the draft's; its docstring says what is wrong."""
    whole = show(f"nsa_tutorial.bench.variants.tilelang_first_draft:{name}").code
    piece = pictures.wrong_piece(name).code
    assert '"""' in whole and '"""' not in piece
    assert [line for line in whole.splitlines() if '"""' not in line] == piece.splitlines()


# -- the kernel from an empty cell --

BUILT = EXERCISES["tilelang_selected_attention"]


@needs_tilelang
def test_what_is_built_is_selected_attention() -> None:
    """Kernel and twin give what the operator gives, on every case."""
    for case in BUILT.cases:
        q, k, v, ids, block_size, scale, asks_lse = case.arguments()
        expected = ops.selected_attention(
            q[None], k[None], v[None], ids[None], block_size=block_size, scale=scale,
            return_lse=True, backend="reference",
        )  # fmt: skip
        expected = tuple(x[0] for x in expected) if asks_lse else expected[0][0]
        for function in (BUILT.solution, chapter._walked):
            assert same(BUILT.run(function, *case.arguments()), expected, 1e-5), case.name


@needs_tilelang
def test_each_mistake_in_what_is_built_is_named_as_itself() -> None:
    for known in BUILT.misconceptions:
        verdict = judge(BUILT, known.wrong)
        assert verdict.misconceptions == (known.name,)
        assert verdict.held < len(BUILT.stages)


@needs_tilelang
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("edits", "mistake"),
    [
        ({"T.And(start >= 0, start <= position)": "start <= position"},
         "loading a block for an empty slot"),
        ({"T.And(start >= 0, start <= position)": "start >= 0"}, "NaN from a block of the future"),
        ({"is_seen = start + j <= position": "is_seen = start + j < M"},
         "giving weight to keys of the future"),
        ({"clear=False": "clear=True"}, "taking the maximum of this block alone"),
        *(({line: "pass"}, "a tile that is not set before it is read") for line in (
            "T.clear(acc_s)", "T.clear(acc_o)", "T.clear(running_sum)",
            'T.fill(scores_max, -T.infinity("float32"))')),
        ({'T.fill(scores_max, -T.infinity("float32"))': "T.clear(scores_max)"},
         "a maximum that begins at 0"),
        ({"acc_o[g, d] *= scores_scale[g]": "acc_o[g, d] *= 1"}, "an output that is not rescaled"),
        ({"position = M - N + t": "position = t"}, "taking the queries for the first positions"),
        ({"Lists[t, head, slot]": "Lists[t, 0, slot]"}, "one list for all KV heads"),
        ({"T.if_then_else(running_sum[g] == 0, 0, acc_o[g, d] / running_sum[g])":
          "acc_o[g, d] / running_sum[g]"}, "0 / 0 where nothing is seen"),
        ({"scores_max[g] + T.log": "T.log"}, "an lse without the maximum"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_mistake_in_the_kernel_is_that_of_its_twin(edits: dict[str, str], mistake: str) -> None:
    wrong = Edited(BUILT.solution, edits, parts=BUILT.parts)
    assert judge(BUILT, wrong).misconceptions == (mistake,)


@needs_tilelang
def test_a_sum_that_races_holds_no_stage() -> None:
    """On a CPU its numbers are right."""
    line = "T.reduce_sum(acc_s, scores_sum, dim=1)"
    clear, turn = "for g in T.Parallel(G): scores_sum[g] = 0", "for g, j in T.Parallel(G, BS): "
    racing = f"{clear}\n                    {turn}scores_sum[g] += acc_s[g, j]"
    verdict = judge(BUILT, Edited(BUILT.solution, {line: racing}, parts=BUILT.parts))
    assert verdict.held == 0
    assert "turns of T.Parallel add to the same places of `scores_sum`" in verdict.text


@needs_tilelang
def test_half_a_kernel_is_praised_for_what_it_does() -> None:
    """Until the last stage, `o` alone will do."""
    verdict = judge(BUILT, lambda *given: BUILT.solution(*given)[0])
    assert (verdict.held, len(BUILT.stages)) == (6, 7)


@needs_tilelang
@pytest.mark.parametrize(
    ("attempt", "told"),
    [
        (chapter._walked, "you build it yourself here"),
        (lambda q, k, v, *_: q.new_zeros(*q.shape[:2], v.shape[2]),
         "No TileLang kernel was launched"),
        (lambda *given: ops.selected_attention(
            *(x[None] for x in given[:4]), block_size=given[4], scale=given[5],
            backend="reference")[0],
         "you build it yourself here"),
    ],
    ids=["PyTorch", "nothing", "operator"],
)  # fmt: skip
def test_what_is_built_launches_a_kernel(attempt: Callable, told: str) -> None:
    verdict = judge(BUILT, attempt)
    assert (verdict.outcome, verdict.held) == ("wrong", 0)
    assert told in verdict.text


# -- the exercises' draft --

COMPILED = ("update_max", "is_seen", "normalise")  # pieces of the draft


@pytest.mark.exhaustive
@needs_tilelang
@pytest.mark.parametrize("name", COMPILED)
def test_the_solution_makes_the_draft_right(name: str) -> None:
    """On every case, the draft with the solution is what the reference computes."""
    e = EXERCISES[name]
    for case in e.cases:
        q, k, v, ids, causal, scale = case.arguments()
        block_size = 4 if name == "is_seen" else 2
        expected = ops.selected_attention(
            q, k, v, ids, block_size=block_size, causal=causal, scale=scale, backend="reference"
        )
        assert same(e.run(e.solution, *case.arguments()), expected, 1e-4), case.name


@pytest.mark.exhaustive
@needs_tilelang
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive)
        if name in ("update_max", "is_seen")
        else name
        for name in COMPILED
    ],
)
def test_the_draft_makes_the_first_mistake(name: str) -> None:
    """The first misconception of each exercise is the draft's own mistake."""
    from nsa_tutorial.bench.variants import tilelang_first_draft

    e = EXERCISES[name]
    first = e.misconceptions[0].name
    if name in COMPILED:  # looking for the others would compile each
        e = replace(e, misconceptions=e.misconceptions[:1])
    verdict = judge(e, tilelang_first_draft.MISTAKES[name])
    assert (verdict.outcome, verdict.misconception) == ("misconception", first)


@needs_tilelang
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name, e in EXERCISES.items() if e.run is not None])
def test_each_mistake_in_a_kernel_is_named_as_itself(name: str) -> None:
    judged.assert_mistakes_are_named(EXERCISES[name])


@needs_tilelang
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "double",
    [double for double in chapter.DOUBLES if EXERCISES[double.exercise].run is not None],
    ids=lambda double: double.exercise,
)
def test_two_slips_in_a_kernel_are_both_named(double: exercises.Double) -> None:
    judged.assert_both_are_named(EXERCISES[double.exercise], double)


@needs_tilelang
@pytest.mark.exhaustive
def test_a_sum_above_zero_swallows_nan() -> None:
    """Named where a visible key is NaN, and nowhere else: NaN is compared as equal to NaN."""
    e = EXERCISES["normalise"]
    mistake = next(
        m for m in e.misconceptions if m.name == "taking a row with a NaN for an empty one"
    )
    verdict = judge(replace(e, misconceptions=(mistake,)), mistake.wrong)
    assert (verdict.outcome, verdict.misconception) == ("misconception", mistake.name)
    assert "Smallest failing case: one query with one key, which is NaN." in verdict.text
    others = tuple(case for case in e.cases if "NaN" not in case.name)
    assert judge(replace(e, misconceptions=(), cases=others), mistake.wrong).outcome == "right"


def test_a_tiny_error_is_seen_in_the_answers() -> None:
    """They are written with as many digits as it takes, and with four where four are enough."""
    right = torch.tensor([[0.25, -1.5]])
    for got in (right / (1 + 1e-6), right / (1 + 1e-3)):
        first, second = difference(got, right).splitlines()
        assert first.removeprefix("got").strip() != second.removeprefix("expected").strip()
    assert difference(2 * right, right) == "got      [[ 0.5, -3. ]]\nexpected [[ 0.25, -1.5 ]]"


@pytest.mark.exhaustive
@needs_tilelang
def test_a_piece_that_cannot_be_compiled_is_one_error(capfd: pytest.CaptureFixture) -> None:
    def normalise(acc_o, running_sum, G, BV):
        for i in undefined_name(G):  # noqa: F821
            acc_o[i, 0] = 0

    e = EXERCISES["normalise"]
    verdict = judge(replace(e, misconceptions=()), normalise)  # looking for them would compile each
    assert verdict.outcome == "wrong"
    assert "it raised NameError" in verdict.text
    assert "".join(capfd.readouterr()).count("\n") < 3, (
        "TileLang's page of generated code stays away"
    )


@needs_tilelang
def test_a_condition_without_a_return_is_an_error_and_not_the_end() -> None:
    """None as a condition would end the process."""

    def is_seen(query, key, num_keys, causal):
        if causal:
            return (key < num_keys) & (query >= key)

    e = EXERCISES["is_seen"]
    verdict = judge(replace(e, misconceptions=(), cases=e.cases[:1]), is_seen)
    assert "is_seen returned None: does every branch have its `return`?" in verdict.text


def test_without_tilelang_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    here = environment.detect()
    monkeypatch.setattr(environment, "detect", lambda: replace(here, tilelang=None))
    for name in ("listed_attention", "tilelang_selected_attention", *COMPILED):
        e = EXERCISES[name]
        verdict = judge(e, e.solution)
        assert verdict.outcome == "not attempted"
        assert "cannot be judged here. Not run: TileLang is not installed here" in verdict.text
    e = EXERCISES["programs_per_sm"]
    assert judge(e, e.solution).outcome == "right"
    assert not isinstance(e.solution(16, 64, 64, 32, 1, 2), Raised) and math.isfinite(
        e.solution(16, 64, 64, 32, 1, 2)[0]
    )


# -- what the tutor says --


@needs_tilelang
def test_the_kernel_of_all_slips_is_right_without_one() -> None:
    """A slip changes what it is named for, and nothing else."""
    e = EXERCISES["listed_attention"]
    assert judge(e, e.misconceptions[0].wrong.switches()).outcome == "right"


@pytest.mark.parametrize(
    ("step", "least"), [(4, 30), pytest.param(1, 120, marks=pytest.mark.exhaustive)]
)
def test_nearly_every_pair_of_mistakes_is_named(step: int, least: int) -> None:
    """Of the pairs that go together; now and then, one mistake hides another on all cases."""
    e = EXERCISES["programs_per_sm"]
    found = []
    for first, second in [*combinations(e.misconceptions, 2)][::step]:
        try:
            both = together(first.wrong, second.wrong)
        except ValueError:
            continue
        found.append(set(judge(e, both).misconceptions) == {first.name, second.name})
    assert len(found) > least
    assert sum(found) > 0.9 * len(found)


def without_clear(acc_s: object, scores_max: object) -> None:
    T.reduce_max(acc_s, scores_max, dim=1)


def by_absolute_value(acc_s: object, scores_max: object) -> None:
    T.reduce_absmax(acc_s, scores_max, dim=1, clear=False)


def with_pythons_max(acc_s: object, scores_max: object) -> None:
    for g, j in T.Parallel(2, 2):
        scores_max[g] = max(scores_max[g], acc_s[g, j])


def with_and(query: object, key: object, num_keys: object, causal: bool) -> object:
    return key < num_keys and query >= key if causal else key < num_keys


def without_parentheses(query: object, key: object, num_keys: object, causal: bool) -> object:
    return key < num_keys & query >= key if causal else key < num_keys


def with_if(query: object, key: object, num_keys: object, causal: bool) -> object:
    if key >= num_keys:
        return False
    return query >= key if causal else True


def divided_at_once(acc_o: object, running_sum: object, G: int, BV: int) -> None:
    acc_o = acc_o / running_sum


def without_nan(acc_o: object, running_sum: object, G: int, BV: int) -> None:
    for i, j in T.Parallel(G, BV):
        acc_o[i, j] = acc_o[i, j] / running_sum[i]
        acc_o[i, j] = T.if_then_else(T.isnan(acc_o[i, j]), 0, acc_o[i, j])


def with_a_tiny_epsilon(acc_o: object, running_sum: object, G: int, BV: int) -> None:
    for i, j in T.Parallel(G, BV):
        acc_o[i, j] = acc_o[i, j] / (running_sum[i] + 1e-6)


def by_sum(acc_s: object, scores_max: object) -> None:
    T.reduce_sum(acc_s, scores_max, dim=1)


def key_and_block(query: object, key: object, num_keys: object, causal: bool) -> object:
    return T.And(query >= key if causal else True, key + 4 <= num_keys)


def joined_with_causal(query: object, key: object, num_keys: object, causal: bool) -> object:
    return T.And(causal, query >= key)


def next_power(G: int, D: int, DV: int, BS: int, num_stages: int, itemsize: int) -> tuple[int, int]:
    G, D, DV, BS = (max(16, 1 << (n - 1).bit_length()) for n in (G, D, DV, BS))
    size = (G * D + max(num_stages, 1) * BS * (D + DV)) * itemsize
    return size, 228 * 1024 // (size + 1024)


def with_the_reserve(
    G: int, D: int, DV: int, BS: int, num_stages: int, itemsize: int
) -> tuple[int, int]:
    G, D, DV, BS = (math.ceil(n / 16) * 16 for n in (G, D, DV, BS))
    size = (G * D + max(num_stages, 1) * BS * (D + DV)) * itemsize + 1024
    return size, 228 * 1024 // size


def by_first_keys(acc_s: object, scores_max: object) -> None:
    for g in T.Parallel(acc_s.shape[0]):
        scores_max[g] = T.max(scores_max[g], acc_s[g, 0])


PYTHON_DECIDES = "asking Python for what only the kernel knows"
TYPED = [
    ("update_max", without_clear, "taking the maximum of this block alone"),
    ("update_max", by_absolute_value, "taking the largest magnitude for the maximum"),
    ("update_max", with_pythons_max, PYTHON_DECIDES),
    ("update_max", by_first_keys, "taking each block's first key for its maximum"),
    ("update_max", by_sum, "adding the scores up in place of their maximum"),
    ("is_seen", key_and_block, "taking each key for the start of a block"),
    ("is_seen", joined_with_causal, "seeing nothing where nothing is causal"),
    ("is_seen", with_and, PYTHON_DECIDES),
    ("is_seen", without_parentheses, PYTHON_DECIDES),
    ("is_seen", with_if, PYTHON_DECIDES),
    ("normalise", divided_at_once, "dividing whole tiles as if they were numbers"),
    ("normalise", with_a_tiny_epsilon, "adding a small number to every sum"),
    ("normalise", without_nan, "taking a row with a NaN for an empty one"),
    ("programs_per_sm", next_power, "rounding up to a power of two"),
    (
        "programs_per_sm",
        with_the_reserve,
        "adding the SM's own KiB to the program's bytes",
    ),
]


@pytest.mark.parametrize(
    ("name", "typed", "mistake"),
    [
        # each needs several kernels, which take seconds to compile
        pytest.param(*row, id=row[1].__name__, marks=[pytest.mark.exhaustive] * compiles)
        for row in TYPED
        for compiles in [row[0] in COMPILED]
    ],
)
def test_what_a_reader_would_type_is_recognised(name: str, typed: Callable, mistake: str) -> None:
    if EXERCISES[name].missing:
        pytest.skip(EXERCISES[name].missing[0])
    assert judge(EXERCISES[name], typed).misconception == mistake


def without_an_output(acc_s: object, scores_max: object) -> None:
    T.reduce_max(acc_s, dim=1, clear=False)


def with_torch(acc_s: object, scores_max: object) -> None:
    scores_max = torch.maximum(scores_max, acc_s)


def with_a_method(acc_s: object, scores_max: object) -> None:
    scores_max = acc_s.max(1)  # noqa: F841


def with_text(acc_s: object, scores_max: object) -> None:
    T.reduce_max(acc_s, scores_max, dim=1, clear="False")


def with_another_languages_false(acc_s: object, scores_max: object) -> None:
    T.reduce_max(acc_s, scores_max, dim=1, clear=false)  # noqa: F821


def with_a_tile_in_an_if(acc_o: object, running_sum: object, G: int, BV: int) -> None:
    for i, j in T.Parallel(G, BV):
        if running_sum == 0:
            acc_o[i, j] = 0
        else:
            acc_o[i, j] = acc_o[i, j] / running_sum[i]


def with_where(acc_o: object, running_sum: object, G: int, BV: int) -> None:
    for i, j in T.Parallel(G, BV):
        acc_o[i, j] = T.where(running_sum[i] == 0, 0, acc_o[i, j] / running_sum[i])


def with_our_dtype(acc_s: object, scores_max: object) -> None:
    T.fill(scores_max, -T.infinity(accum_dtype))  # noqa: F821
    T.reduce_max(acc_s, scores_max, dim=1)


def without_a_choice(acc_o: object, running_sum: object, G: int, BV: int) -> None:
    for i, j in T.Parallel(G, BV):
        acc_o[i, j] = T.if_then_else(running_sum[i] == 0, acc_o[i, j] / running_sum[i])


@needs_tilelang
@pytest.mark.parametrize(
    ("name", "typed", "told"),
    [
        ("update_max", without_an_output, "missing 1 required positional argument: 'out'\nCount"),
        ("update_max", with_torch, "A kernel's tiles and numbers are no tensors"),
        ("update_max", with_a_method, "A kernel's tiles and numbers are no tensors"),
        ("update_max", with_text, "Does text in quotes stand where"),
        ("update_max", with_our_dtype, 'stands for the text "float32"'),
        ("update_max", with_another_languages_false, "Python writes `False`"),
        ("normalise", with_a_tile_in_an_if, "compares the whole tile `running_sum`"),
        ("normalise", with_where, "is `T.if_then_else(condition, a, b)`"),
        ("normalise", without_a_choice, "missing 1 required positional argument: 'f'\nCount"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_an_error_that_says_enough_is_no_known_mistake(
    name: str, typed: Callable, told: str
) -> None:
    """Though whole tiles, taken for numbers, raise a TypeError as well."""
    e = EXERCISES[name]
    whole_tiles = tuple(m for m in e.misconceptions if "whole tiles" in m.name)
    verdict = judge(replace(e, misconceptions=whole_tiles, cases=e.cases[:1]), typed)
    assert len(whole_tiles) == 1
    assert verdict.outcome == "wrong"
    assert told in verdict.text


def one_too_many(query: object, key: object, num_keys: object, causal: bool) -> object:
    return key <= num_keys and (query >= key or not causal)


@pytest.mark.exhaustive
@needs_tilelang
@pytest.mark.parametrize(
    ("typed", "is_right"), [(with_and, True), (with_if, True), (one_too_many, False)]
)
def test_right_logic_in_plain_python_is_called_right(typed: Callable, is_right: bool) -> None:
    e = EXERCISES["is_seen"]
    known = tuple(m for m in e.misconceptions if m.name == PYTHON_DECIDES)
    verdict = judge(replace(e, misconceptions=known, cases=e.cases[-2:]), typed)
    assert verdict.misconceptions == (PYTHON_DECIDES,)
    assert verdict.text.count("logic is right") == is_right


@needs_tilelang
def test_three_conditions_in_one_and_are_explained() -> None:
    def is_seen(query, key, num_keys, causal):
        return T.And(key < num_keys, query >= key, causal)

    e = EXERCISES["is_seen"]
    verdict = judge(replace(e, misconceptions=(), cases=e.cases[:1]), is_seen)
    assert "`T.And` joins two conditions." in verdict.text


@needs_tilelang
def test_the_name_of_and_is_told() -> None:
    def is_seen(query, key, num_keys, causal):
        return T.and_(key < num_keys, query >= key)

    e = EXERCISES["is_seen"]
    verdict = judge(replace(e, misconceptions=(), cases=e.cases[:1]), is_seen)
    assert "`T.And(a, b)`" in verdict.text and "Did you mean" not in verdict.text


@needs_tilelang
def test_a_reduction_the_wrong_way_round_is_explained() -> None:
    def update_max(acc_s, scores_max):
        T.reduce_max(scores_max, acc_s, dim=1, clear=False)

    e = EXERCISES["update_max"]
    verdict = judge(replace(e, misconceptions=(), cases=e.cases[:1]), update_max)
    assert verdict.outcome == "wrong"
    assert "reads the tile and writes the fragment" in verdict.text


@needs_tilelang
def test_a_kernel_that_is_known_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """TileLang warns of a kernel that it compiled before."""
    warned = []

    def normalise(acc_o, running_sum, G, BV):
        for i in range(G):
            for j in range(BV):
                acc_o[i, j] = T.if_then_else(running_sum[i] == 0, 0, acc_o[i, j] / running_sum[i])

    e = replace(EXERCISES["normalise"], cases=EXERCISES["normalise"].cases[:1])
    warns = type("Warns", (logging.Handler,), {"emit": lambda self, record: warned.append(record)})
    monkeypatch.setattr(logging.getLogger("tilelang"), "handlers", [warns(logging.WARNING)])
    for _ in range(2):
        exercises.chapter_module("tilelang_forward")._COMPILED.clear()
        assert judge(e, normalise).outcome == "right"
    assert not warned
    logging.getLogger("tilelang.cache.kernel_cache").warning("heard")
    assert len(warned) == 1


@needs_tilelang
@pytest.mark.exhaustive
def test_an_inverse_sum_is_right() -> None:
    """The tolerance sees 1e-6 beside a sum of 1, and grants another order of operations."""

    def normalise(acc_o, running_sum, G, BV):
        for i, j in T.Parallel(G, BV):
            inverse = 1.0 / running_sum[i]
            acc_o[i, j] = T.if_then_else(running_sum[i] == 0, 0, acc_o[i, j] * inverse)

    assert judge(EXERCISES["normalise"], normalise).outcome == "right"


def test_thoughts_about_guesses_hold() -> None:
    """The wrong guesses are the numbers that the thoughts lead to."""
    thoughts = {
        p.name: [guess for guess, _ in p.thoughts if not callable(guess)]
        for p in exercises.chapter_module("tilelang_forward").PREDICTIONS
    }
    tokens, heads, H, S = 65_536, 64, 4, 16
    loaded = tokens * H * S * 64 * 2 * 128 * 2
    right = loaded / 1e9
    assert round(loaded / 2**30) in thoughts["gigabytes_loaded"]
    assert 0.1 < 2 * tokens * H * 128 * 2 / 1e9 < 0.15, "all keys and values, once"
    assert round(2 * tokens * H * 128 * 2 / 1e6) in thoughts["gigabytes_loaded"], "in MB"
    for factor in (1 / 2, 1 / H, 1 / S, 1 / S / 2, heads // H, 2):
        assert any(abs(x / right / factor - 1) < 0.01 for x in thoughts["gigabytes_loaded"])
    programs_per_sm = EXERCISES["programs_per_sm"].solution
    fit = [programs_per_sm(16, 128, 128, 64, stages, 2)[1] for stages in (1, 2, 3)]
    assert fit == [6, 3, 2]
    keys, queries = 64 * 128 * 2, 16 * 128 * 2
    sizes = [queries + 4 * keys, queries + 2 * keys + 2048, queries + keys, queries // 2 + keys]
    assert {228 * 1024 // (size + 1024) for size in sizes} < set(thoughts["programs_that_fit"])
    assert math.ceil(228 / 36) in thoughts["programs_that_fit"]
