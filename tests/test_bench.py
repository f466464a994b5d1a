"""The benchmark measures what it says, judges what it measures, and writes what can be read
again."""

from __future__ import annotations

import csv
import functools
import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from nsa_tutorial import ops
from nsa_tutorial.bench import __main__ as bench
from nsa_tutorial.bench import drawing, judging, measuring, timing
from nsa_tutorial.bench.inputs import Shape
from nsa_tutorial.bench.operators import (
    CHOOSING,
    GATES,
    OPERATORS,
    parts_of,
    with_choice,
)
from nsa_tutorial.bench.problem import Problem, Results, dense
from nsa_tutorial.bench.steps import PROBES, Step, newest_first, steps_of
from nsa_tutorial.course import heads
from nsa_tutorial.sparse.selected_attention import dense_mask, masked_attention

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = Shape(
    tokens=100, kv_heads=2, group=3, width=8, value_width=5, block_size=16, slots=3, dtype="float32"
)
SMALL = ["--device", "cpu", "--backend", "reference", "--tokens", "70", "90"]
SMALL += ["--kv-heads", "2", "--group", "2", "--width", "8"]
QUICK = ["--block-size", "16", "--slots", "3", "--seconds", "0.01"]
GRADIENTS = ("d_q", "d_k", "d_v")
# windows of summaries that are no multiple of anything
NSA = replace(SHAPE, slots=5, length=12, stride=5, window=20)
KINDS = [*drawing.DRIFTS]
ATTENDING = ["selected", "window"]
SPARSE = ["compressed", "selection", "pooling", "gates", "native"]


def problem_of(operator: str, shape: Shape | None = None) -> Problem:
    shape = shape or (SHAPE if operator in ATTENDING else NSA)
    has_lists = operator in ("selected", "selection", "native")
    problem = Problem.make(operator, shape, "cpu", "random" if has_lists else "")
    return with_choice(problem, "reference") if operator == "native" else problem


def reference(problem: Problem) -> tuple[torch.Tensor, ...]:
    return problem.run("reference")


# -- lists --


@pytest.mark.parametrize("drawn", [2**24, 1], ids=["in one part", "in many"])
@pytest.mark.parametrize("kind", KINDS)
def test_lists(kind: str, drawn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Distinct causal blocks, ascending; of the forced ones as many as there is room for."""
    monkeypatch.setattr(drawing, "DRAWN", drawn)
    tokens, slots = 600, 4
    ids = drawing.draw(kind, tokens, 2, 16, slots, "cpu")
    assert (ids.shape, ids.dtype) == ((1, tokens, 2, slots), torch.int32)
    for query, both in enumerate(ids[0].tolist()):
        own = query // 16
        for row in both:
            listed = [i for i in row if i >= 0]
            assert row == sorted(set(listed)) + [-1] * (slots - len(listed))
            assert len(listed) == min(slots, own + 1)
            assert {own, max(own - 1, 0), 0} <= set(listed) <= set(range(own + 1))
    assert torch.equal(ids, drawing.draw(kind, tokens, 2, 16, slots, "cpu")), "the same again"
    assert not torch.equal(ids[:, :, 0], ids[:, :, 1]), "every head draws its own"


@pytest.mark.parametrize("kind", KINDS)
def test_more_slots_than_blocks_and_fewer_than_are_forced(kind: str) -> None:
    ids = drawing.draw(kind, 40, 1, 16, 5, "cpu")
    assert ids[0, -1, 0].tolist() == [0, 1, 2, -1, -1]
    ids = drawing.draw(kind, 100, 1, 16, 1, "cpu")
    assert torch.equal(ids[0, :, 0, 0], torch.arange(100).int() // 16), "the own block comes first"


@pytest.mark.parametrize("neighbours", [1, 2, 3, 4, 7])
def test_overlap_counts_distinct_blocks(neighbours: int) -> None:
    ids = drawing.draw("random", 150, 2, 16, 4, "cpu")
    together = alone = 0
    for start in range(0, 150 - neighbours + 1, neighbours):
        for head in range(2):
            tile = ids[0, start : start + neighbours, head]
            together += len(set(tile[tile >= 0].tolist()))
            alone += (tile >= 0).sum().item() / neighbours
    assert drawing.overlap(ids, neighbours) == pytest.approx(together / alone)


def test_overlap_from_agreeing_to_sharing_nothing() -> None:
    ids = torch.arange(24).reshape(1, 8, 1, 3)
    assert drawing.overlap(ids) == 4
    assert drawing.overlap(ids[:, :1].expand(-1, 8, -1, -1)) == 1
    ids[0, 1::2] = -1  # every other query lists nothing
    assert drawing.overlap(ids) == 4
    with pytest.raises(ValueError, match="neighbours: got 9, expected at most 8"):
        drawing.overlap(ids, 9)


@pytest.mark.parametrize(
    ("neighbours", "tokens"),
    [
        (4, 8192),
        *(pytest.param(n, 8192, marks=pytest.mark.exhaustive) for n in (2, 8)),
        *(pytest.param(n, 65536, marks=pytest.mark.exhaustive) for n in (2, 4, 8)),
    ],
)
def test_trained_lists_overlap_as_the_stored_heads_do(neighbours: int, tokens: int) -> None:
    """`trained` lies among the stored heads, and between the other kinds, at two lengths."""
    stored = overlaps_of_stored_heads(neighbours)
    if neighbours == 4:
        assert [round(min(stored), 2), round(max(stored), 2)] == [1.16, 1.43], "the docstring's"
    random, smooth, trained = (
        drawing.overlap(long_lists(kind, tokens), neighbours)
        for kind in ("random", "smooth", "trained")
    )
    assert smooth < 1.05
    assert smooth < min(stored) - 0.03 < trained < max(stored) < random
    if neighbours == 4:
        assert abs(trained - {8192: 1.16, 65536: 1.29}[tokens]) < 0.02, "the docstring's"


@functools.cache
def long_lists(kind: str, tokens: int) -> torch.Tensor:
    return drawing.draw(kind, tokens, 1, 64, 16, "cpu")


def overlaps_of_stored_heads(neighbours: int) -> list[float]:
    """The overlap of each KV head's lists: the 8 blocks of 16 keys that hold most of the group's
    attention, the forced ones among them, for queries that have twice as many to choose from."""
    stored, block_size, slots = heads.load(), 16, 8
    weights = heads.attention_weights(stored.q, stored.k)[0]  # [HQ, N, N]
    mass = heads.block_mass(weights, block_size).unflatten(0, (-1, stored.G)).sum(1)  # [H, N, NB]
    own = torch.arange(mass.shape[1])[:, None] // block_size
    block = torch.arange(mass.shape[2])
    mass = mass.masked_fill(block > own, -1)
    mass = mass.masked_fill((block == 0) | (block == own) | (block == own - 1), math.inf)
    ids = mass.topk(slots, -1).indices[:, 2 * slots * block_size :]  # [H, N, S]
    return [drawing.overlap(head[None, :, None], neighbours) for head in ids]


def test_newest_first() -> None:
    ids = torch.tensor([[[0, 4, 7, -1]], [[0, -1, -1, -1]]])
    assert newest_first(ids).tolist() == [[[7, 4, 0, -1]], [[0, -1, -1, -1]]]


# -- passes --


def test_the_backward_does_not_run_the_forward() -> None:
    problem, runs = problem_of("selected"), []

    def run(problem: Problem) -> tuple[torch.Tensor, ...]:
        runs.append(1)
        return reference(problem)

    with torch.no_grad():  # as the benchmark does
        backward = problem.prepare("backward", run)
        first, again = backward(), backward()
        assert len(runs) == 1
        both = problem.prepare("both", run)()
        assert len(runs) == 2
        forward = problem.prepare("forward", run)()
    assert not forward["o"].requires_grad
    for name in GRADIENTS:
        assert torch.equal(first[name], again[name])
        assert torch.equal(first[name], both[name])
    assert torch.equal(forward["o"], both["o"])


def test_dense_attention_is_a_list_of_all_blocks() -> None:
    """What stands beside the kernels computes the same kind of thing, gradients and all."""
    problem = problem_of("selected", replace(SHAPE, slots=7))
    found = problem.prepare("both", dense(None))()
    for name, x in problem.prepare("both", reference)().items():
        torch.testing.assert_close(found[name], x)


# -- judging --


@pytest.mark.parametrize("operator", ATTENDING)
def test_the_truth_is_what_autograd_says_of_dense_attention(operator: str) -> None:
    problem = problem_of(operator)
    if operator == "selected":
        mask = dense_mask(problem.block_indices, 100, block_size=16)
    else:
        away = torch.arange(100)[:, None] - torch.arange(100)
        mask = ((away >= 0) & (away < 48))[None, :, None].expand(1, -1, 2, -1)
    q, k, v = (x.double().requires_grad_() for x in (problem.q, problem.k, problem.v))
    o, _ = masked_attention(q, k, v, mask)
    found = dict(zip(GRADIENTS, torch.autograd.grad(o, (q, k, v), problem.d_o), strict=True))
    truth = judging.truth(problem, gradients=True)
    assert truth.keys() == {"o", *GRADIENTS}
    for name, x in {"o": o, **found}.items():
        for place, expected in truth[name]:
            torch.testing.assert_close(x[place], expected, atol=1e-12, rtol=1e-12)
    assert judging.truth(problem, gradients=False).keys() == {"o"}


def test_where_results_are_checked() -> None:
    truth = judging.truth(problem_of("selected"), gradients=True)
    (_, queries), _ = truth["o"][0]
    assert {0, 36, 99} <= set(queries.tolist()), "the last 64, and others over all"
    places = [(keys.start, keys.stop, head) for (_, keys, head), _ in truth["d_k"]]
    assert places == [(0, 16, 0), (48, 64, 1), (96, 100, 0)]


def native_by_lists(p: Problem, backend: str) -> tuple[torch.Tensor]:
    """`native` by the lists and the rounded summaries of a problem, differentiable through the
    means: what rounding adds to them is a constant."""
    s, gates = p.shape, [p.tensors[x] for x in GATES]
    window = torch.arange(s.num_summaries)[:, None] * s.stride + torch.arange(s.length)
    means = [x[:, window].mean(2) for x in (p.k, p.v)]
    rounding = [p.tensors[x] - y.detach() for x, y in zip(("k_cmp", "v_cmp"), means, strict=True)]
    o_cmp = ops.compressed_attention(
        p.q, means[0] + rounding[0], means[1] + rounding[1], num_keys=s.tokens, length=s.length,
        stride=s.stride, backend=backend,
    )  # fmt: skip
    outputs = (o_cmp, *OPERATORS["lists_and_window"].run(p, backend))
    return (sum(g[..., None] * o for g, o in zip(gates, outputs, strict=True)),)


@pytest.mark.parametrize("tokens", [100, 40])
@pytest.mark.parametrize("operator", ["compressed", "pooling", "gates", "native"])
def test_the_truth_is_what_the_reference_says_in_fp64(operator: str, tokens: int) -> None:
    problem = problem_of(operator, replace(NSA, tokens=tokens))
    wide = problem.with_tensors(**{x: y.double() for x, y in problem.tensors.items()})
    run = native_by_lists if operator == "native" else Problem.run
    found = wide.prepare("both", lambda p: run(p, "reference"))()
    truth = judging.truth(problem, gradients=True)
    assert truth.keys() - {"ids"} == found.keys()
    for name, x in found.items():
        for place, expected in truth[name]:
            torch.testing.assert_close(x[place], expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("operator", [*ATTENDING, "compressed", "pooling", "gates", "native"])
def test_rounding_is_right(operator: str, dtype: str) -> None:
    shape = SHAPE if operator in ATTENDING else NSA
    problem = problem_of(operator, replace(shape, dtype=dtype))
    truth = judging.truth(problem, gradients=True)
    errors, is_right = judging.judge(problem.prepare("both", reference)(), truth)
    assert is_right
    known = OPERATORS[operator]
    assert errors.keys() == {*known.outputs, *(f"d_{x}" for x in known.inputs)}
    assert all(0 <= error < 0.1 for error in errors.values())
    assert errors.keys() <= measuring.COLUMNS.keys()


def one_number(name: str, *place: int, by: float) -> Callable[[Results], None]:
    def spoil(found: Results) -> None:
        found[name][place] += by

    return spoil


SPOILED = {
    "one number of the output": one_number("o", 0, 99, 0, 0, by=1.0),
    "NaN in the output": one_number("o", 0, 99, 0, 0, by=math.nan),
    "NaN where nothing is checked": one_number("d_k", 0, 20, 0, 0, by=math.nan),
    "infinity where nothing is checked": one_number("d_v", 0, 20, 0, 0, by=math.inf),
    "one number of a query's gradient": one_number("d_q", 0, 70, 3, 0, by=1.0),
    "one number of a key's gradient": one_number("d_k", 0, 3, 0, 0, by=5.0),
    "one number of a value's gradient": one_number("d_v", 0, 99, 0, 4, by=1.0),
    "all by a fiftieth": lambda found: found["d_k"].mul_(1.02),
    "the middle block of the other head": lambda found: found["d_v"][0, 48:64, 1].zero_(),
    "the sum over one head of three": lambda found: found["d_v"].mul_(1 / 3),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_what_is_wrong_is_found(spoil: Callable[[Results], None]) -> None:
    problem = problem_of("selected", replace(SHAPE, dtype="bfloat16"))
    truth = judging.truth(problem, gradients=True)
    found = problem.prepare("both", reference)()
    spoil(found)
    assert not judging.judge(found, truth)[1]


SPOILED_NATIVE = {
    "one number of the output": one_number("o", 0, 99, 0, 0, by=1.0),
    "one number of a gate's gradient": one_number("d_g_slc", 0, 70, 3, by=1.0),
    "the window's gate at another head": lambda found: found["d_g_swa"].copy_(
        found["d_g_swa"].roll(1, -1)
    ),
    "one number of a key's gradient": one_number("d_k", 0, 3, 0, 0, by=1.0),
    "values without the summaries' part": lambda found: found["d_v"].mul_(0.9),
}


@pytest.mark.parametrize("spoil", SPOILED_NATIVE.values(), ids=SPOILED_NATIVE)
def test_what_is_wrong_in_native_is_found(spoil: Callable[[Results], None]) -> None:
    problem = problem_of("native", replace(NSA, dtype="bfloat16"))
    truth = judging.truth(problem, gradients=True)
    found = problem.prepare("both", reference)()
    spoil(found)
    assert not judging.judge(found, truth)[1]


@pytest.mark.parametrize("left_out", GATES)
def test_a_branch_left_out_is_found(left_out: str) -> None:
    problem = problem_of("native")
    truth = judging.truth(problem, gradients=True)
    without = problem.with_tensors(**{left_out: 0 * problem.tensors[left_out]})
    found = without.prepare("both", reference)()
    for name in ("o", "d_q", "d_k", "d_v"):
        assert not judging.judge({name: found[name]}, truth)[1], name


# -- judging lists --

WORTH = torch.tensor([math.inf, 0.5, 0.25, 0.0, math.inf, math.inf, -1.0, -1.0])
LISTS = {
    "the best": ([0, 1, 2, 4, 5], 0),
    "one that is worth less": ([0, 1, 3, 4, 5], 1),
    "without a forced one": ([0, 1, 2, 3, 5], 1),
    "one of the future": ([0, 1, 4, 5, 6], 1),
    "one past the end": ([0, 1, 4, 5, 8], 1),
    "one too few": ([0, 1, 4, 5, -1], 1),
    "one twice": ([0, 1, 1, 4, 5], 1),
    "out of order": ([1, 0, 2, 4, 5], 1),
    "an empty slot inside": ([0, 1, -1, 4, 5], 1),
    "all there are, and empty slots": ([0, 1, 2, 3, 4, 5, -1, -1], 0),
    "empty slots first": ([-1, -1, 0, 1, 2, 3, 4, 5], 1),
    "a negative id for an empty slot": ([0, 1, 2, 3, 4, 5, -2, -1], 1),
    "fewer than are forced": ([0, 5], 0),
}


@pytest.mark.parametrize(("ids", "wrong"), LISTS.values(), ids=LISTS)
def test_which_lists_are_wrong(ids: list[int], wrong: int) -> None:
    both = torch.tensor([ids, ids])[:, None]
    assert judging.wrong_lists(both, WORTH.expand(2, 1, -1)) == 2 * wrong


@pytest.mark.parametrize(("by", "wrong"), [(1e-5, 0), (1e-3, 1)])
def test_a_list_may_differ_by_rounding(by: float, wrong: int) -> None:
    worth = torch.tensor([[[1.0, 1.0 + by, 0.5]]], dtype=torch.float64)
    assert judging.wrong_lists(torch.tensor([[[0]]]), worth) == wrong
    assert judging.wrong_lists(torch.tensor([[[1]]]), worth) == 0


@pytest.mark.parametrize("kind", ["random", "smooth"])
@pytest.mark.parametrize("tokens", [9, 100, 333])
def test_the_reference_chooses_the_best(kind: str, tokens: int) -> None:
    """Under a window that blocks do not divide, and with no summary for the first queries."""
    shape = replace(NSA, tokens=tokens, length=7, stride=3)
    problem = Problem.make("selection", shape, "cpu", kind)
    truth = judging.truth(problem, gradients=False)
    (ids,) = reference(problem)
    assert judging.judge({"ids": ids}, truth) == ({"ids": 0}, True)
    if tokens > 100:
        # the other head's
        wrong = problem.with_tensors(k_cmp=problem.tensors["k_cmp"].roll(1, 2))
        found, is_right = judging.judge({"ids": reference(wrong)[0]}, truth)
        assert found["ids"] > 30
        assert not is_right


def test_smooth_queries_choose_smooth_lists() -> None:
    shape = replace(SHAPE, tokens=1500, slots=8, length=8, stride=4)
    overlap = {}
    for kind in ("random", "smooth"):
        problem = Problem.make("selection", shape, "cpu", kind)
        assert problem.q.mean().abs() < 0.05
        assert abs(problem.q.std() - 1) < 0.05
        overlap[kind] = drawing.overlap(reference(problem)[0])
    assert overlap["smooth"] < 1.1 < 1.8 < overlap["random"]


@pytest.mark.parametrize("operator", ATTENDING)
def test_a_query_left_out_of_a_sum_is_found(operator: str) -> None:
    """Every query sees one of the blocks that are checked: the first is on every list."""
    problem = problem_of(operator)
    truth = judging.truth(problem, gradients=True)
    for query in (0, 9, 40, 99):
        d_o = problem.d_o.clone()
        d_o[:, query] = 0
        found = problem.with_tensors(d_o=d_o).prepare("backward", reference)()
        found = {name: found[name] for name in ("d_k", "d_v")}
        assert not judging.judge(found, truth)[1], query


# -- rows --


def rows_of(path: Path) -> list[dict]:
    return json.loads(path.read_text())["rows"]


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    assert bench.main(["selected", *SMALL, *QUICK, "--output", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["command"].startswith("python -m nsa_tutorial.bench selected --device cpu")
    assert found["torch"] == torch.__version__
    assert [(r["kernel"], r["tokens"]) for r in found["rows"]] == [
        ("reference", 70), ("dense", 70), ("reference", 90), ("dense", 90),
    ]  # fmt: skip
    for row in found["rows"]:
        assert 0 < row["ms_low"] <= row["ms"] <= row["ms_high"]
        fastest = next(
            r["ms"]
            for r in found["rows"]
            if r["kernel"] == "dense" and r["tokens"] == row["tokens"]
        )
        assert row["dense_ratio"] == pytest.approx(fastest / row["ms"])
        assert row["peak_mib"] is None, "the CPU's memory is not counted"
    assert "90 tokens" in capsys.readouterr().err, "the progress bar"


def test_lists_and_passes(tmp_path: Path) -> None:
    """Each kind of list has its rows in each pass; dense attention, which reads no list, one a
    pass, to which the others of that pass are compared."""
    path = tmp_path / "rows.json"
    sizes = ["--tokens", "200", "--slots", "5"]
    chosen = ["--lists", *KINDS, "--pass", "forward", "backward", "both", "--output", str(path)]
    assert bench.main(["selected", *SMALL, *QUICK, *sizes, *chosen]) == 0
    rows = rows_of(path)
    ours = [row for row in rows if row["kernel"] == "reference"]
    fastest = {row["direction"]: row["ms"] for row in rows if row["kernel"] == "dense"}
    assert [(row["lists"], row["direction"]) for row in ours] == [
        (kind, direction) for kind in KINDS for direction in ("forward", "backward", "both")
    ]
    assert len(rows) - len(ours) == len(fastest) == 3
    for row in ours:
        assert row["is_right"]
        assert 1 <= row["overlap"] <= 4
        assert (row["error"] is None) == (row["direction"] == "backward")
        assert (row["d_k_error"] is None) == (row["direction"] == "forward")
        assert row["dense_ratio"] == pytest.approx(fastest[row["direction"]] / row["ms"])
    overlap = {row["lists"]: row["overlap"] for row in ours}
    assert overlap["smooth"] <= overlap["trained"] < overlap["random"]


@pytest.mark.parametrize("operator", SPARSE)
def test_rows_of_the_other_operators(operator: str, tmp_path: Path) -> None:
    """Forward and, where there is one, backward; dense attention where it does the same work."""
    path = tmp_path / "rows.json"
    has_lists, has_dense = operator in CHOOSING, operator in ("compressed", "native")
    group = [] if operator == "pooling" else ["--group", "2"]
    sizes = ["--tokens", "70", "--kv-heads", "2", *group, "--width", "8", "--seconds", "0.01"]
    passes = ["--pass", "forward", "both", "--backend", "reference", "--output", str(path)]
    queries = ["--queries", "random", "smooth"] if has_lists else []
    assert bench.main([operator, "--device", "cpu", *sizes, *passes, *queries]) == 0
    rows = rows_of(path)
    ours = [row for row in rows if row["kernel"] == "reference"]
    assert len(ours) == 2 + 2 * has_lists
    assert len(rows) - len(ours) == 2 * has_dense
    for row in ours:
        if operator == "selection" and row["direction"] == "both":
            assert row["note"] == "NotImplementedError: selection: there is no backward"
            continue
        assert row["is_right"]
        assert row["note"] == ""
        assert (row["dense_ratio"] is not None) == has_dense
        assert row["wrong_lists"] == (0 if has_lists else None)
        assert (row["overlap"] is not None) == has_lists
        assert (row["error"] is not None) == (operator != "selection")
        is_trained = operator in ("gates", "native") and row["direction"] == "both"
        assert (row["d_g_error"] is not None) == is_trained


@pytest.mark.parametrize("block_size", [1, 16])
def test_an_indexers_choice_is_judged(block_size: int, tmp_path: Path) -> None:
    """In the rows, and a list that names a worse block for a better one is found out."""
    path = tmp_path / "rows.json"
    sizes = ["--tokens", "70", "--kv-heads", "2", "--group", "2", "--width", "8", "--slots", "3"]
    sizes += ["--block-size", str(block_size), "--seconds", "0.01", "--output", str(path)]
    assert bench.main(["indexing", "--device", "cpu", "--backend", "reference", *sizes]) == 0
    assert [row["wrong_lists"] for row in rows_of(path)] == [0]
    problem = Problem.make("indexing", replace(SHAPE, block_size=block_size), "cpu")
    truth = judging.truth(problem, gradients=False)
    found = problem.prepare("forward", reference)()
    assert judging.judge(found, truth) == ({"ids": 0}, True)
    last = found["ids"][0, -1, 0]
    others = set(range(100 // block_size)) - set(last.tolist())
    last[:2] = torch.tensor(sorted(others)[:2])
    last.copy_(last.sort().values)
    assert judging.judge(found, truth) == ({"ids": 1}, False)


def test_the_parts_of_native_make_the_whole() -> None:
    problem = problem_of("native")
    parts = dict(parts_of(problem))
    found = {name: reference(part) for name, part in parts.items()}
    o_slc, o_swa = found["lists and window at once"]
    torch.testing.assert_close(found["attention to lists"][0], o_slc)
    torch.testing.assert_close(found["window"][0], o_swa)
    assert torch.equal(found["choice of blocks"][0], problem.block_indices)
    assert torch.equal(found["summaries"][0], problem.tensors["k_cmp"])
    branches = (found["attention to summaries"][0], o_slc, o_swa)
    gates = [problem.tensors[x] for x in GATES]
    whole = sum(g[..., None] * o for g, o in zip(gates, branches, strict=True))
    torch.testing.assert_close(reference(problem)[0], whole)


def test_steps_of_native_are_passes_over_its_parts() -> None:
    problem = problem_of("native")
    for direction in ("forward", "backward"):
        steps = dict(steps_of(problem, "reference", direction))
        assert ("choice of blocks" in steps) == (direction == "forward")
        for name, step in steps.items():
            assert not step.is_judged
            with torch.no_grad():
                found = step.make()()
            assert all(x.startswith("d_") == (direction == "backward") for x in found), name


def test_launches_of_a_kernel_are_summed_by_calls() -> None:
    assert timing.per_call([1, 2, 3, 10, 20, 30], 2) == [6, 60]
    for launches in ([], [1, 2, 3]):  # none, or one that was lost
        with pytest.raises(LookupError, match=f"got {len(launches)} launches of the kernel in 2"):
            timing.per_call(launches, 2)


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    assert bench.main(["window", *SMALL, *QUICK, "--no-dense", "--output", str(path)]) == 0
    rows = list(csv.DictReader(path.open()))
    assert [row["kernel"] for row in rows] == ["reference", "reference"]
    assert {row["torch"] for row in rows} == {torch.__version__}
    assert all(row["command"].startswith("python -m nsa_tutorial.bench window") for row in rows)
    assert all(row["is_right"] == "True" and row["dense_ratio"] == "" for row in rows)
    assert all(row["lists"] == row["overlap"] == "" for row in rows), "a window has no lists"


def test_csv_on_the_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    bench.main(["selected", *SMALL[:-1], "8", *QUICK, "--no-dense"])
    rows = list(csv.DictReader(capfd.readouterr().out.splitlines()))
    assert len(rows) == 2


@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
def test_a_wrong_kernel_is_a_failure(
    direction: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right = Problem.run
    monkeypatch.setattr(Problem, "run", lambda *a: tuple(1.01 * x for x in right(*a)))
    path = tmp_path / "rows.json"
    arguments = [*SMALL, *QUICK, "--pass", direction, "--no-dense", "--output", str(path)]
    assert bench.main(["selected", *arguments]) == 1
    assert [row["is_right"] for row in rows_of(path)] == [False, False]


def test_what_cannot_run_is_noted() -> None:
    blank = measuring.Row(
        **asdict(SHAPE), operator="selected", kernel="x", change="y", direction="forward"
    )

    def fails() -> object:
        raise RuntimeError("first line\nno such tile")

    for make in (fails, lambda: fails):  # before the call is made, and in it
        row = measuring.measured(blank, Step(make), "cpu", 0.01, {})
        assert (row.ms, row.note) == (None, "RuntimeError: no such tile")
        assert replace(row, note="") == blank


def test_a_row_without_a_dense_time_has_no_ratio() -> None:
    blank = measuring.Row(
        **asdict(SHAPE), operator="selected", kernel="x", change="", direction="forward", ms=2.0
    )
    dense = [replace(blank, kernel=name, ms=ms) for name, ms in (("a", 6.0), ("b", 3.0))]
    failed = replace(blank, kernel="dense", direction="backward", ms=None)
    rows = [blank, replace(blank, direction="backward"), replace(blank, ms=None)]
    ratios = [row.dense_ratio for row in measuring.with_ratios(rows, [*dense, failed])]
    assert ratios == [1.5, None, None]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("selected --output x.txt", "--output: got x.txt, expected a name that ends in .json or"),
        ("selected --device cpu --steps", "--steps: got --device cpu, expected cuda"),
        (
            "selected --device cuda --steps --backend reference",
            "--steps: got no kernel that has steps, expected one of: tilelang forward, triton",
        ),
        (
            "selected --device cpu --backend triton --dtype bfloat16",
            "bfloat16|not installed|CUDA tensors only",
        ),
        ("selected --output no/x.json", "--output: got no/x.json, but there is no folder no"),
        ("selected --plot x.jpg", "--plot: got x.jpg, expected a name that ends in .png, .svg or"),
        ("selected --order tiles", "--order: got tiles without --backend triton, expected auto"),
        ("selected --order sideways", "invalid choice: 'sideways'"),
        ("window --order tiles", "unrecognized arguments: --order tiles"),
        ("selected --lists sorted", "invalid choice: 'sorted'"),
        ("native --device cpu --tokens 20 64", "--tokens: got 20, expected at least 32, a summary"),
        ("selection --device cpu --slots 8 2", "--slots: got 2, expected at least 3, the forced"),
        ("native --lists random", "unrecognized arguments: --lists random"),
        ("gates --no-dense", "unrecognized arguments: --no-dense"),
        ("window --lists random", "unrecognized arguments: --lists random"),
        ("selected --pass sideways", "invalid choice: 'sideways'"),
        ("dense", "invalid choice: 'dense'"),
    ],
)
def test_errors_in_one_sentence(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench.main(arguments.split())
    errors = capsys.readouterr().err
    assert re.search(message, errors), errors


# What each number is given instead, and how the answer ends.
NUMBERS = {
    "--tokens": ("0 -5 3 1.5 x nan 4294967296", "expected a whole number from 4 to 2,147,483,647"),
    "--width": ("0 -1 257 inf", "expected a whole number from 1 to 256"),
    "--value-width": ("0 -1 257 inf", "expected a whole number from 1 to 256"),
    "--jobs": ("0 -1 x 1000000000", "expected a whole number from 1 to 256"),
    "--seconds": ("0 -1 nan inf x 1000000000", "expected a number of seconds above 0, at most"),
    **dict.fromkeys(
        [
            "--kv-heads",
            "--group",
            "--block-size",
            "--slots",
            "--length",
            "--stride",
            "--window",
            "--sequences",
            "--layer",
        ],
        ("0 -1 x nan 4294967296", "expected a whole number from 1 to 2,147,483,647"),
    ),
}
# The same of a number that no machine has room for.
TOO_MUCH = {
    **dict.fromkeys(
        ["--tokens", "--kv-heads", "--group"], "--tokens, --kv-heads, --group: got .*000,000.* GiB"
    ),
    "--block-size": "--block-size: got 1000000000, expected at most .*, all tokens",
    "--slots": "--slots: got 1000000000, expected at most .*, as many as there are blocks",
    "--length": "--tokens: got .*, expected at least 1000000000, a summary's length",
}


def test_every_number_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    """No number, or one that is too small or too large, for any machine or for this one, is
    answered with a sentence that names the option. Where operators share it, one is asked."""
    commands = next(a for a in bench.parser()._actions if a.dest == "operator").choices
    asked = {
        action.option_strings[0]: operator
        for operator, command in commands.items()
        for action in command._actions
        if action.metavar in ("n", "s") or action.type in (int, float)
    }
    assert asked.keys() == NUMBERS.keys()
    for option, operator in asked.items():
        values, expected = NUMBERS[option]
        cases = {x: re.escape(f"argument {option}: got {x}, {expected}") for x in values.split()}
        if option in TOO_MUCH:
            cases["1000000000"] = TOO_MUCH[option]
        for value, message in cases.items():
            with pytest.raises(SystemExit):
                bench.main([operator, "--device", "cpu", "--backend", "reference", option, value])
            errors = capsys.readouterr().err
            assert re.search(message, errors), (operator, option, value, errors)


def test_the_bounds_themselves_run(tmp_path: Path) -> None:
    """The fewest tokens, more slots than there are blocks, and a window of every key."""
    always = ["--device", "cpu", "--backend", "reference", "--width", "8", "--group", "1"]
    always += ["--seconds", "0.001", "--output", str(tmp_path / "rows.json")]
    few = ["--tokens", "4", "--slots", "16", "--block-size", "32"]
    assert bench.main(["selected", *always, *few]) == 0
    wide = ["--tokens", "32", "--block-size", "32", "--window", str(2**31 - 1)]
    assert bench.main(["native", *always, *wide]) == 0


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        bench.main(["selected", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for option in (
        "tokens",
        "dtype",
        "steps",
        "output",
        "seconds",
        "lists",
        "pass",
        "group",
        "order",
    ):
        assert f"--{option}" in text


# -- on a GPU --


def rows_of_steps(path: Path, backend: str, *arguments: str) -> dict[str, dict]:
    """The rows of a backend by what was changed."""
    sizes = ["--tokens", "1024", "--slots", "4", "--seconds", "0.02", "--steps"]
    bench.main(["selected", "--backend", backend, *sizes, *arguments, "--output", str(path)])
    return {row["change"]: row for row in rows_of(path) if row["kernel"] == backend}


@pytest.mark.gpu
def test_steps_on_the_gpu(tmp_path: Path) -> None:
    """Every decision of the TileLang kernel is measured, and all but warp specialisation is
    right."""
    pytest.importorskip("tilelang")
    rows = rows_of_steps(tmp_path / "rows.json", "tilelang")
    expected = {"", "first draft, mended, 2 stages", "values through registers", "64 threads"}
    assert {*expected, "loads and products alone", "loads alone"} <= rows.keys()
    judged = {c: row for c, row in rows.items() if c not in PROBES and not c.startswith("warp")}
    assert all(row["is_right"] for row in judged.values())


@pytest.mark.gpu
def test_triton_steps_on_the_gpu(tmp_path: Path) -> None:
    rows = rows_of_steps(tmp_path / "rows.json", "triton")
    changes = {"pointers", "pointers, 1 warp", "pointers, 4 stages", "pointers, empty slots walked"}
    assert {"", *changes} <= rows.keys()
    assert all(row["ms"] for row in rows.values())
    assert all(row["is_right"] for change, row in rows.items() if change not in PROBES)


@pytest.mark.gpu
@pytest.mark.parametrize("operator", ATTENDING)
def test_passes_on_the_gpu(operator: str, tmp_path: Path) -> None:
    """Kernels and both dense ones, forward and backward, with what memory they take."""
    path = tmp_path / "rows.json"
    lists = ["--lists", *KINDS] if operator == "selected" else []
    arguments = ["--backend", "triton", "--tokens", "2000", "--group", "4", *lists]
    passes = ["--pass", "forward", "backward", "both", "--seconds", "0.02"]
    assert bench.main([operator, *arguments, *passes, "--output", str(path)]) == 0
    for row in rows_of(path):
        assert row["ms"], row["note"]
        output = 2 * 2000 * 16 * 128 / 2**20  # what is returned, at the least, in MiB
        assert row["peak_mib"] > 0.99 * output


@pytest.mark.gpu
@pytest.mark.parametrize("operator", SPARSE)
def test_the_other_operators_on_the_gpu(operator: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    group = [] if operator == "pooling" else ["--group", "4"]
    arguments = ["--backend", "triton", "--tokens", "2000", *group, "--seconds", "0.02"]
    queries = ["--queries", "random", "smooth"] if operator in CHOOSING else []
    passes = ["--pass", "forward"] + ["backward", "both"] * (operator != "selection")
    arguments += [*queries, *passes, "--output", str(path)]
    assert bench.main([operator, *arguments]) == 0
    assert all(row["ms"] and row["peak_mib"] > 0 for row in rows_of(path))


@pytest.mark.gpu
@pytest.mark.parametrize("operator", CHOOSING)
def test_parts_on_the_gpu(operator: str, tmp_path: Path) -> None:
    """Every part takes less than the whole, and the kernels of the choice nearly all of it: with so
    many tokens, the host's millisecond does not count."""
    path = tmp_path / "rows.json"
    arguments = ["--backend", "triton", "--tokens", "32768", "--seconds", "0.05", "--steps"]
    assert bench.main([operator, *arguments, "--output", str(path)]) == 0
    found = {row["change"]: row["ms"] for row in rows_of(path) if row["kernel"] == "triton"}
    whole = found.pop("")
    assert all(0 < ms < whole for ms in found.values())
    if operator == "selection":
        assert 0.7 * whole < found["scores alone"] + found["pick alone"] < 1.1 * whole
