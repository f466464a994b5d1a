"""What goes wrong over several ranks ends with a sentence on each of them, and nothing hangs;
`--verify` finds mistakes, and `record` writes what chapter 18 draws."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import many_gpus_cases as cases
import pytest
import torch
from ranks import Ranks

from nsa_tutorial.training.many_gpus import Cut, make_mesh, record_timeline
from nsa_tutorial.training.many_gpus import __main__ as command_line
from nsa_tutorial.training.many_gpus.agreement import difference
from nsa_tutorial.training.many_gpus.meshes import context_of
from nsa_tutorial.training.many_gpus.record_timeline import timeline

MODULE = "nsa_tutorial.training.many_gpus"
TIMEOUT, LONG = 4.0, 12.0  # seconds


@pytest.fixture
def mortal() -> Iterator[Ranks]:
    """Two ranks of which one may die."""
    ranks = Ranks(2, timeout=TIMEOUT)
    yield ranks
    ranks.close()


def test_a_wrong_length(two: Ranks) -> None:
    first, second = two.run(cases.told, [Cut(2, 45)] * 2, [{}] * 2, 1)
    name, text = second
    assert name == "ValueError"
    assert text == (
        "x: got 23 tokens, expected 24, those of rank 1 of a zigzag cut of 45 tokens over 2 ranks"
    )
    assert first == (
        "RanksDisagree", f"rank 1 of this context was called with a wrong argument: {text}"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "name"),
    [({"block_size": 8}, "block_size"), ({"window_size": 9}, "window_size"),
     ({"stride": 3}, "stride"), ({"block_counts": 4}, "block_counts"),
     ({"learn_choice": True}, "learn_choice"), ({"scale": 0.5}, "scale")],
)  # fmt: skip
def test_ranks_that_disagree(two: Ranks, change: dict, name: str) -> None:
    for error, text in two.run(cases.told, [Cut(2, 45)] * 2, [{}, change]):
        assert error == "RanksDisagree"
        assert text.startswith(f"{name}: got ") and "on rank 0" in text and "on rank 1" in text


def test_cuts_that_disagree(two: Ranks) -> None:
    cuts = [Cut(2, 44), Cut(2, 44, "contiguous")]
    for error, text in two.run(cases.told, cuts, [{}] * 2):
        assert error == "RanksDisagree" and "zigzag" in text and "contiguous" in text
    assert two.run(cases.told, [Cut(2, 44)] * 2, [{}] * 2) == [("", "")] * 2  # and life goes on


@pytest.mark.parametrize(
    ("change", "text"),
    [({"block_counts": 2}, "block_counts: got 2, expected an int of at least 3"),
     ({"block_size": 0}, "block_size: got 0, expected an int of at least 1"),
     ({"backend": "cuda"}, "backend: got")],
)  # fmt: skip
def test_wrong_options(two: Ranks, change: dict, text: str) -> None:
    for error, found in two.run(cases.told, [Cut(2, 45)] * 2, [change] * 2):
        assert error == "ValueError" and found.startswith(text)


def test_a_cut_for_other_ranks(two: Ranks) -> None:
    for error, text in two.run(cases.told, [Cut(3, 45)] * 2, [{}] * 2):
        assert error == "ValueError"
        assert text == "cut: got one for 3 ranks, expected 2, as many as the mesh has"


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_rank_that_dies(mortal: Ranks, when: str) -> None:
    (error, text, seconds), _ = mortal.run(cases.told_of_a_death, when, TIMEOUT, patience=LONG)
    assert error == "RankLost" and "One of them has died" in text
    assert seconds < 2 * TIMEOUT


@pytest.mark.exhaustive
def test_a_rank_that_does_not_come(mortal: Ranks) -> None:
    (error, text, seconds), _ = mortal.run(cases.told_of_a_death, "never", TIMEOUT, patience=LONG)
    assert error == "RankLost" and "did not come within the timeout" in text
    assert seconds < 2 * TIMEOUT


# -- without processes --


@pytest.mark.parametrize(
    ("arguments", "text"),
    [((0, 4), "ranks: got 0, expected an int of at least 1"),
     ((2, -1), "tokens: got -1, expected an int of at least 0"),
     ((2, 4, "ring"), "kind: got 'ring' (str), expected one of contiguous, zigzag"),
     ((2, 4, "zigzag", (0, 3)), "documents: got [0, 3], expected offsets that never decrease, from "
      "0 to the number of tokens, 4")],
)  # fmt: skip
def test_a_wrong_cut(arguments: tuple, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        Cut(*arguments)
    assert str(caught.value) == text


def test_a_wrong_text() -> None:
    with pytest.raises(ValueError, match=r"x: got .*, expected 5 tokens in dimension 1"):
        Cut(2, 5).shard(torch.zeros(1, 4), 0)


def test_a_wrong_mesh() -> None:
    with pytest.raises(ValueError, match="data: got 0, expected an int of at least 1"):
        make_mesh(0, 1, "cpu")
    with pytest.raises(ValueError, match=r"device: got 'tpu' \(str\), expected one of cuda, cpu"):
        make_mesh(1, 1, "tpu")
    with pytest.raises(TypeError, match=r"mesh: got 3 \(int\), expected a DeviceMesh"):
        context_of(3)


def test_the_first_problem_is_told() -> None:
    settings = [{"problem": "", "a": "1"}, {"problem": "too long", "a": "2"}]
    assert difference(settings).endswith("with a wrong argument: too long")
    settings[1]["problem"] = ""
    assert difference(settings).startswith("a: got 1 on rank 0, 2 on rank 1")


# -- the commands --


@pytest.mark.parametrize("fault", [None, *cases.FAULTS])
def test_verify_finds_a_mistake(two: Ranks, fault: str | None) -> None:
    for found in two.run(cases.verified, 2, fault):
        assert found and all(found) == (fault is None)


@pytest.mark.exhaustive
def test_verify_on_four(four: Ranks) -> None:
    for found in four.run(cases.verified, 4):
        assert found and all(found)


@pytest.mark.parametrize("is_right", [True, False])
def test_exit_status(is_right: bool) -> None:
    ranks = Ranks(2)
    try:
        assert ranks.run(cases.command, is_right) == [int(not is_right)] * 2
    finally:
        ranks.close()


def test_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="start this by torchrun: torchrun --nproc-per-node 2 -m"):
        command_line.processes()


def torchrun(*arguments: str) -> subprocess.CompletedProcess:
    """The command over two processes on the CPU."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    quiet = {"capture_output": True, "text": True, "env": environment, "timeout": 300}
    return subprocess.run([*command, *arguments], **quiet, check=False)


@pytest.mark.exhaustive
def test_torchrun_verifies() -> None:
    done = torchrun(MODULE, "--verify", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert "one process and several agree" in done.stdout


@pytest.mark.exhaustive
def test_record(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    flags = ["--output", str(path), "--device", "cpu", "--tokens", "100", "--repeats", "2"]
    done = torchrun(f"{MODULE}.record", *flags)
    assert done.returncode == 0, done.stderr
    stored = json.loads(path.read_text())
    assert stored["command"].startswith(f"torchrun --nproc-per-node 2 -m {MODULE}.record --output")
    rows = stored["rows"]
    assert {row["kind"] for row in rows} == {"speed", "bytes", "lists", "timeline"}
    speed = [row for row in rows if row["kind"] == "speed"]
    assert [row["gpus"] for row in speed] == [1, 2, 2] * 2
    assert all(row["ms"] > 0 and row["efficiency"] > 0 for row in speed)
    assert all(row["different"] == 0 for row in rows if row["kind"] == "lists")
    for row in (row for row in rows if row["kind"] == "bytes"):
        for rank in row["ranks"]:
            assert rank["by_hand"] == {"forward": rank["forward"], "backward": rank["backward"]}


def event(name: str, stream: int, start: float, length: float) -> dict:
    """Of the profiler."""
    return {"cat": "kernel", "name": name, "ts": start, "dur": length, "args": {"stream": stream}}


def test_timeline() -> None:
    """Two computing kernels, and a gather that one and a half of them hide."""
    found = timeline(
        [
            {"cat": "cpu_op", "name": "aten::add", "ts": 0, "dur": 9999},
            event("ncclDevKernel_AllGather_RING_LL(ncclArgs<4096ul>)", 20, 1005, 20),
            event("void forward<int>(int*)", 7, 1000, 10),
            event("void forward<int>(int*)", 7, 1020, 10),
        ]
    )  # fmt: skip
    assert found["names"] == ["forward", "ncclDevKernel_AllGather_RING_LL"]
    assert found["events"] == [[0, 7, 0, 10], [1, 20, 5, 20], [0, 7, 20, 10]]
    assert found["communication_ms"] == 0.02 and found["compute_ms"] == 0.02
    assert found["hidden_ms"] == 0.01


def test_union_and_common() -> None:
    union = record_timeline.union([(5, 7), (0, 2), (1, 3), (7, 8)])
    assert union == [(0, 3), (5, 8)]
    assert record_timeline.common(union, [(2, 6), (7, 9)]) == [(2, 3), (5, 6), (7, 8)]
    assert record_timeline.length_of(union) == 6


@pytest.mark.gpu
def test_over_nccl() -> None:
    """fp64 as on one GPU, and the kernels in bf16."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    ranks = Ranks(2, "cuda")
    try:
        for found in ranks.run(cases.verified_on_gpus, patience=600.0):
            wrong = [comparison for comparison in found if not comparison.is_right]
            assert len(found) > 8 and not wrong, wrong
    finally:
        ranks.close()
