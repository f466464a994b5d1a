"""The capstone over several ranks: the losses of one process, and checkpoints that any number of
processes can read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import capstone_cases as cases
import pytest
from ranks import Ranks

from nsa_tutorial.training.capstone import checkpoints
from nsa_tutorial.training.capstone.__main__ import main
from nsa_tutorial.training.capstone.checkpoints import lines_until
from nsa_tutorial.training.capstone.train import Run

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def expected() -> list[float]:
    """The losses of one process."""
    return [metrics["loss"] for metrics in Run(cases.settings()).steps()]


def close(losses: list[float], expected: list[float]) -> bool:
    """The same but for the order of sums in fp32."""
    return losses == pytest.approx(expected, abs=2e-5)


# -- losses --


def test_losses_are_those_of_one_process(two: Ranks, expected: list[float]) -> None:
    for losses in two.run(cases.trained, 2, None, 10):
        assert close(losses, expected)


def test_a_text_for_each_rank(two: Ranks, expected: list[float]) -> None:
    for losses in two.run(cases.trained, 1, None, 4):
        assert close(losses, expected[:4])


@pytest.mark.exhaustive
@pytest.mark.parametrize("context", [2, 4])
def test_four_ranks(four: Ranks, expected: list[float], context: int) -> None:
    for losses in four.run(cases.trained, context, None, 10):
        assert close(losses, expected)


@pytest.mark.exhaustive
def test_scores_that_learn(two: Ranks) -> None:
    settings = cases.settings(attention="learned-choice")
    expected = [metrics["loss"] for metrics in Run(settings).steps()]
    for losses in two.run(cases.trained, 2, None, 10, attention="learned-choice"):
        assert close(losses, expected)


# -- checkpoints --


def test_resumed_to_the_bit(two: Ranks, tmp_path: Path) -> None:
    """Steps after the last checkpoint are done again."""
    unbroken = two.run(cases.trained, 2, str(tmp_path / "a"), 10)
    two.run(cases.trained, 2, str(tmp_path / "b"), 6)
    assert two.run(cases.trained, 2, str(tmp_path / "b"), 10, resume=True) == unbroken
    assert [path.name for path in (tmp_path / "b").glob("checkpoint-*")] == ["checkpoint-10"]


def test_saved_on_two_and_loaded_on_one_and_back(
    two: Ranks, tmp_path: Path, expected: list[float]
) -> None:
    out = tmp_path / "run"
    two.run(cases.trained, 2, str(out), 4)
    alone = Run(cases.settings(), out, checkpoint_every=4, resume=True)
    assert close([metrics["loss"] for metrics in alone.steps(8)], expected[4:8])
    assert (out / checkpoints.NAME).exists() and not (out / checkpoints.SHARED).exists()
    assert close(two.run(cases.trained, 2, str(out), 10, resume=True)[0], expected)
    assert not (out / checkpoints.NAME).exists()


@pytest.mark.exhaustive
def test_saved_on_two_and_loaded_on_four(
    two: Ranks, four: Ranks, tmp_path: Path, expected: list[float]
) -> None:
    two.run(cases.trained, 2, str(tmp_path / "run"), 4)
    assert close(four.run(cases.trained, 4, str(tmp_path / "run"), 10, resume=True)[0], expected)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("a run already", "there is a run already (checkpoint.json)"),
        ("other settings", "seed: 0 there, 1 here"),
        ("broken", "cannot be read"),
        ("no tensors", "cannot be read"),
        ("full", "could not be written"),
    ],
)
def test_a_folder_that_cannot_be_used(two: Ranks, tmp_path: Path, fault: str, words: str) -> None:
    """A sentence on every rank, and nothing is overwritten."""
    out = tmp_path / "run"
    two.run(cases.trained, 2, str(out), 4)
    if fault == "broken":
        (out / checkpoints.SHARED).write_text("{")
    if fault == "no tensors":
        for path in out.glob("checkpoint-4/*"):
            path.unlink()
    if fault == "full":
        (out / "checkpoint-10").write_text("in the way of a folder")
    before = sorted(path.name for path in out.rglob("*"))
    for found in two.run(cases.refused, str(out), fault):
        assert words in found, found
    assert fault == "full" or before == sorted(path.name for path in out.rglob("*"))
    if fault == "full":
        assert json.loads((out / checkpoints.SHARED).read_text())["step"] == 4


# -- the command --


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--context-parallel", "2"], "begin with torchrun --nproc-per-node 2"),
        (["--context-parallel", "2", "--attention", "random"], "attention: got 'random'"),
        (["--context-parallel", "2", "--backend", "masks"], "backend: got 'masks'"),
        (["--context-parallel", "0"], "--context-parallel: got 0, expected at least 1"),
        (["--timeout", "-1"], "--timeout: got -1.0"),
    ],
)
def test_flags_that_do_not_fit(
    flags: list[str], words: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    try:
        assert main(flags) == 2
    except SystemExit as end:
        assert end.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.exhaustive
def test_a_rank_that_is_killed_ends_the_others(tmp_path: Path) -> None:
    """And the run goes on from its last checkpoint, to the same losses."""
    sizes = {"length": 96, "batch": 2, "width": 16, "head-width": 16, "steps": 60}
    flags = [x for name, value in sizes.items() for x in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m",
               "nsa_tutorial.training.capstone", "--context-parallel", "2", "--timeout", "20",
               "--checkpoint-every", "10", *flags]  # fmt: skip
    out = tmp_path / "run"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    victim = subprocess.Popen([*command, "--out", str(out)], **quiet)
    while victim.poll() is None and len(lines_until(out, 60)) < 25:
        time.sleep(0.05)
    os.kill(child_of(victim.pid), signal.SIGKILL)
    assert victim.wait(timeout=60) != 0
    assert 25 <= len(lines_until(out, 60)) < 60
    unbroken = tmp_path / "unbroken"
    for more in (["--out", str(out), "--resume"], ["--out", str(unbroken)]):
        subprocess.run([*command, *more], **quiet, timeout=300, check=True)
    found, expected = ([line["loss"] for line in lines_until(of, 60)] for of in (out, unbroken))
    assert len(found) == 60 and found == expected


def child_of(pid: int) -> int:
    """A process that `torchrun` started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[-1])


def test_ranks_need_a_text_each(two: Ranks) -> None:
    """More groups than texts of a step."""
    found = two.run(cases.too_few_texts)
    assert all("batch: got 1, expected a text for each of 2 groups" in x for x in found)
