"""The commands: `--verify` finds mistakes and exits accordingly, and `record` writes what
chapter 18 draws."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import many_gpus_cases as cases
import pytest
import torch
from ranks import Ranks

from nsa_tutorial.training.many_gpus import __main__ as command_line
from nsa_tutorial.training.many_gpus import record_timeline
from nsa_tutorial.training.many_gpus.record_timeline import timeline

MODULE = "nsa_tutorial.training.many_gpus"


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
