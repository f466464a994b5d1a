"""Checkpoints that a crash cannot break, and metrics that fit them.

A checkpoint is written beside the last one and takes its name in one step, so there is a whole one
at any moment. `metrics.jsonl` may run ahead of it. Whoever resumes cuts the lines that the
checkpoint does not know, and writes them anew.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
from pathlib import Path

import torch

from nsa_tutorial.training.capstone.settings import Settings

NAME, METRICS = "checkpoint.pt", "metrics.jsonl"
SHARED = "checkpoint.json"  # of several processes: `shared_checkpoints`


class CheckpointError(RuntimeError):
    """A folder that a run can neither go on from nor write to; the text says why."""


def save(folder: Path, state: dict) -> None:
    """Write `state`, with "settings" and "step", so that `folder` always holds a whole checkpoint.

    Raises:
        CheckpointError: if it cannot be written; the one before stays.
    """
    new = folder / f"{NAME}.new"
    try:
        with new.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(folder / NAME)
    except (OSError, RuntimeError) as error:  # torch.save turns some of the first into the second
        is_full = getattr(error, "errno", None) == errno.ENOSPC or isinstance(error, RuntimeError)
        new.unlink(missing_ok=True)
        why = "is the disk full?" if is_full else "may this folder be written to?"
        raise CheckpointError(
            f"{folder}: the checkpoint of step {state['step']} could not be written ({error}); "
            f"{why} The one before it, if there is one, is whole."
        ) from error


def load(folder: Path, settings: Settings) -> dict:
    """The state that `save` wrote.

    Raises:
        CheckpointError: if there is none, it is broken, or it is of a run with other settings.
    """
    path = folder / NAME
    if not path.exists():
        raise CheckpointError(f"{path}: there is no checkpoint to resume from")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        other, _ = state["settings"], state["step"]
    except (OSError, RuntimeError, EOFError, KeyError, TypeError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{path}: this checkpoint cannot be read ({reason}); nothing was changed. Move it away "
            "to begin anew."
        ) from error
    if differences := settings.differences(other):
        raise CheckpointError(
            f"{path}: this checkpoint is of another run; nothing was changed.\n  "
            + "\n  ".join(differences)
        )
    return state


def check_new(folder: Path) -> None:
    """A new run begins in a folder without one.

    Raises:
        CheckpointError: if there is a run in it.
    """
    found = [name for name in (NAME, SHARED, METRICS) if (folder / name).exists()]
    if found:
        raise CheckpointError(
            f"{folder}: there is a run already ({found[0]}); go on with --resume, or name another "
            "folder with --out"
        )


def lines_until(folder: Path, step: int) -> list[dict]:
    """The metrics of the first `step` steps; what is cut off in the middle is left out."""
    path, lines = folder / METRICS, []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                break
            if entry["step"] > step:
                break
            lines.append(entry)
    return lines


def cut_metrics(folder: Path, step: int) -> None:
    """Keep the metrics of the first `step` steps, and no others."""
    lines, new = lines_until(folder, step), folder / f"{METRICS}.new"
    new.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    new.replace(folder / METRICS)
