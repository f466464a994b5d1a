"""A run of the capstone: what its folder holds, what a kill costs, and what goes wrong with a
sentence."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from nsa_tutorial.training.capstone import __main__ as command_line
from nsa_tutorial.training.capstone import checkpoints, drawing, evaluate
from nsa_tutorial.training.capstone.settings import Settings
from nsa_tutorial.training.capstone.train import Run

TINY = {
    "attention": "random", "length": 32, "batch": 2, "steps": 40, "width": 16, "query_heads": 2,
    "kv_heads": 1, "head_width": 8, "block_size": 4, "top_n": 4, "window_size": 4,
    "summary_length": 4, "stride": 4, "warmup": 5,
}  # fmt: skip
FLAGS = [
    part for name, value in TINY.items() for part in (f"--{name.replace('_', '-')}", str(value))
]


def losses(folder: Path) -> list[float]:
    lines = checkpoints.lines_until(folder, 10**9)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


@pytest.fixture(scope="module")
def expected() -> list[float]:
    """The losses of a run that nothing stops."""
    return [metrics["loss"] for metrics in Run(Settings(**TINY)).steps()]


def test_a_resumed_run_has_the_same_losses(tmp_path: Path, expected: list[float]) -> None:
    """To the last bit, also where it had gone on after its last checkpoint. The random blocks show
    that random numbers go on, too."""
    first = Run(Settings(**TINY), tmp_path, checkpoint_every=7)
    list(first.steps(17))
    second = Run(Settings(**TINY), tmp_path, checkpoint_every=7, resume=True)
    assert second.step == 14
    list(second.steps())
    assert losses(tmp_path) == expected
    done = Run(Settings(**TINY), tmp_path, resume=True)
    assert done.step == 40 and not list(done.steps())
    assert losses(tmp_path) == expected


def run_and_kill(folder: Path, at: int, *flags: str) -> None:
    """Start a run, and kill it when it has written `at` lines."""
    command = [sys.executable, "-m", "nsa_tutorial.training.capstone", *FLAGS, "--out", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment}
    with subprocess.Popen([*command, "--checkpoint-every", "5", *flags], **quiet) as process:
        path, end = folder / checkpoints.METRICS, time.monotonic() + 120
        while process.poll() is None and time.monotonic() < end:
            if path.exists() and path.read_bytes().count(b"\n") >= at:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.002)


def kill_and_resume(folder: Path, at: int, expected: list[float]) -> None:
    run_and_kill(folder, at)
    settings = Settings(**TINY)
    if (folder / checkpoints.NAME).exists():
        run = Run(settings, folder, checkpoint_every=5, resume=True)
        assert run.step >= at - 5  # no more is lost than since the last checkpoint
        list(run.steps())
        assert losses(folder) == expected


def test_killed(tmp_path: Path, expected: list[float]) -> None:
    kill_and_resume(tmp_path / "run", 13, expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("later", range(5))
def test_killed_at_any_step(tmp_path: Path, expected: list[float], later: int) -> None:
    """So many steps after a checkpoint, an early or a late one."""
    at = 5 * random.Random(later).randint(1, 7) + later % 5
    kill_and_resume(tmp_path / "run", at, expected)


def test_a_line_cut_in_the_middle(tmp_path: Path, expected: list[float]) -> None:
    list(Run(Settings(**TINY), tmp_path, checkpoint_every=5).steps(8))
    metrics = tmp_path / checkpoints.METRICS
    metrics.write_text(metrics.read_text()[:-20])
    list(Run(Settings(**TINY), tmp_path, checkpoint_every=5, resume=True).steps())
    assert losses(tmp_path) == expected


# -- what goes wrong --


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    list(Run(Settings(**TINY), tmp_path, checkpoint_every=2).steps(2))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(checkpoints.CheckpointError, match=r"there is a run already.*--resume"):
        Run(Settings(**TINY), tmp_path)
    changed = Settings(**TINY | {"learning_rate": 1e-4, "seed": 3})
    with pytest.raises(checkpoints.CheckpointError) as caught:
        Run(changed, tmp_path, resume=True)
    assert "learning_rate: 0.003 there, 0.0001 here" in str(caught.value)
    assert "seed: 0 there, 3 here" in str(caught.value)
    path = tmp_path / checkpoints.NAME
    for broken in (path.read_bytes()[:-100], b"", b"no checkpoint at all"):
        path.write_bytes(broken)
        with pytest.raises(checkpoints.CheckpointError, match="cannot be read"):
            Run(Settings(**TINY), tmp_path, resume=True)
        assert path.read_bytes() == broken
    path.write_bytes(before[checkpoints.NAME])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    with pytest.raises(checkpoints.CheckpointError, match="no checkpoint to resume from"):
        Run(Settings(**TINY), tmp_path / "nowhere", resume=True)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("write failed")]
)
def test_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: list[float], error: Exception
) -> None:
    """The checkpoint before it stays, and the run goes on from there."""
    run = Run(Settings(**TINY), tmp_path, checkpoint_every=5)
    list(run.steps(9))

    def fill(state: dict, file: object) -> None:
        file.write(b"half a checkpoint")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fill)
        with pytest.raises(checkpoints.CheckpointError, match=r"step 10 .* is the disk full\?"):
            list(run.steps(12))
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["checkpoint.pt", "metrics.jsonl"]
    list(Run(Settings(**TINY), tmp_path, checkpoint_every=5, resume=True).steps())
    assert losses(tmp_path) == expected


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"attention": "sparse"}, r"attention: got 'sparse'"),
        ({"task": "chess"}, r"task: got 'chess'"),
        ({"steps": 0}, r"steps: got 0"),
        ({"batch": 1.5}, r"batch: got 1\.5"),
        ({"seed": -1}, r"seed: got -1"),
        ({"learning_rate": float("nan")}, r"learning_rate: got nan"),
        ({"length": 33}, r"length: got 33, expected an even number"),
        ({"backend": "cuda"}, r"backend: got 'cuda'"),
        ({"top_n": 2}, r"top_n: got 2"),
        ({"task": "bytes", "length": 10**6}, r"length: got 1000000, expected less than"),
    ],
)
def test_wrong_settings(changes: dict, error: str) -> None:
    with pytest.raises((ValueError, TypeError), match=error):
        next(Run(Settings(**TINY | {"attention": "nsa"} | changes)).steps())


# -- the command line --


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """One command trains, one goes on, one draws."""
    monkeypatch.setattr(command_line.tqdm, "monitor_interval", 0)
    out = ["--out", str(tmp_path / "runs" / "one")]
    assert command_line.main([*FLAGS, *out]) == 0
    assert "after 40 steps the loss is" in capsys.readouterr().out
    facts = json.loads((tmp_path / "runs" / "one" / "result.json").read_text())
    assert facts["settings"]["attention"] == "random" and facts["versions"]["torch"]
    assert facts["found"]["by_distance"] and 0 <= facts["found"]["hits"] <= 1
    assert command_line.main([*FLAGS, *out]) == 1
    assert "there is a run already" in capsys.readouterr().err
    assert command_line.main([*FLAGS, *out, "--resume"]) == 0
    picture = tmp_path / "pictures" / "curves.png"
    draw = ["--draw", str(tmp_path / "runs"), "--picture", str(picture)]
    assert command_line.main(draw) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert list(drawing.runs_in(tmp_path / "runs")) == ["one"]
    assert command_line.main(["--draw", str(tmp_path / "empty")]) == 2
    assert "there is no run in it" in capsys.readouterr().err


def test_without_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert command_line.main([*FLAGS, "--out", str(tmp_path), "--tensorboard"]) == 1
    assert "pip install tensorboard" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_a_compiled_run_has_the_same_losses(tmp_path: Path) -> None:
    """In a process of its own, because compiling depends on what a process has compiled before."""
    command = [sys.executable, "-m", "nsa_tutorial.training.capstone", *FLAGS]
    flags = ["--attention", "nsa", "--compile", "--out", str(tmp_path)]
    subprocess.run([*command, *flags], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    plain = [metrics["loss"] for metrics in Run(Settings(**TINY | {"attention": "nsa"})).steps()]
    assert losses(tmp_path)[:5] == pytest.approx(plain[:5], abs=1e-4)


@pytest.mark.exhaustive
def test_far_answers_separate_the_variants() -> None:
    """Beyond the window a window can only guess, and random blocks mostly miss; dense attention
    finds everything, and NSA what its lists hold, which is far more than chance."""
    sizes = {"length": 64, "batch": 32, "steps": 300, "block_size": 4, "top_n": 4,
             "window_size": 4, "summary_length": 4}  # fmt: skip
    found = {}
    for variant in ("dense", "window", "random", "nsa"):
        run = Run(Settings.of("recall", attention=variant, **sizes))
        list(run.steps())
        found[variant] = evaluate.summary(run, batches=16)
    far = {variant: each["far"] for variant, each in found.items()}
    assert far["dense"] > 0.97 and far["nsa"] > 0.7
    assert far["window"] < 0.05 and far["random"] < far["nsa"] - 0.3
    assert abs(found["nsa"]["hits"] - far["nsa"]) < 0.05
    assert found["nsa"]["hits"] > 4 * found["nsa"]["chance"] > 3 * found["random"]["hits"]


@pytest.mark.parametrize(
    "flags", [["--resume"], ["--tensorboard"], ["--checkpoint-every", "0"], ["--top-n", "0"]]
)
def test_wrong_flags(flags: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as caught:
        command_line.main([*FLAGS[2:4], *flags])
    assert caught.value.code == 2
    assert flags[0].strip("-").replace("-", "_") in capsys.readouterr().err.replace("-", "_")
