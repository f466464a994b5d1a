"""Checkpoints that several processes write together, by `torch.distributed.checkpoint`, and that
any number of processes can read.

The step and the settings are in a small file beside the tensors. It is written last and takes its
name in one step, so there is a whole checkpoint at any moment.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from nsa_tutorial.training.capstone.checkpoints import SHARED, CheckpointError
from nsa_tutorial.training.capstone.settings import Settings

_ERRORS = (CheckpointException, OSError, RuntimeError, ValueError, KeyError, TypeError)


def save(folder: Path, state: dict, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write weights, the optimizer's averages and `state`: "settings", "step", "schedule" and
    "random". All processes call it.

    Raises:
        CheckpointError: on each, if it cannot be written; the one before stays.
    """
    place = folder / f"checkpoint-{state['step']}"
    weights, averages = get_state_dict(model, optimizer)
    tensors = {"model": weights, "optimizer": averages, "random": state["random"]}
    try:
        dcp.save(tensors, checkpoint_id=place)
        if dist.get_rank() == 0:
            _name(folder, place, {k: state[k] for k in ("settings", "step", "schedule")})
    except _ERRORS as error:
        raise CheckpointError(
            f"{folder}: the checkpoint of step {state['step']} could not be written "
            f"({_first_line(error)}); is the disk full? The one before it, if there is one, is "
            "whole."
        ) from error


def _name(folder: Path, place: Path, facts: dict) -> None:
    """Make a checkpoint the one to resume from, and delete those before it."""
    new = folder / f"{SHARED}.new"
    with new.open("w", encoding="utf-8") as file:
        json.dump(facts | {"folder": place.name}, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(folder / SHARED)
    remove(folder, but=place.name)


def remove(folder: Path, but: str = "") -> None:
    """Delete shared checkpoints, all but one of them."""
    if not but:
        (folder / SHARED).unlink(missing_ok=True)
    for old in folder.glob("checkpoint-*"):
        if old.name != but:
            shutil.rmtree(old, ignore_errors=True)


def load(folder: Path, settings: Settings) -> dict | None:
    """What is known of the shared checkpoint in `folder`: "settings", "step", "schedule" and
    "folder"; None if there is none.

    Raises:
        CheckpointError: if it is broken, or of a run with other settings.
    """
    path = folder / SHARED
    if not path.exists():
        return None
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        other, *_ = (facts[name] for name in ("settings", "step", "schedule", "folder"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _broken(path, error) from error
    if differences := settings.differences(other):
        raise CheckpointError(
            f"{path}: this checkpoint is of another run; nothing was changed.\n  "
            + "\n  ".join(differences)
        )
    return facts


def restore(
    folder: Path, facts: dict, model: nn.Module, optimizer: torch.optim.Optimizer, random: list
) -> list:
    """Read the tensors of a checkpoint into a model and an optimizer; the random states.

    Raises:
        CheckpointError: if they cannot be read.
    """
    place = folder / facts["folder"]
    weights, averages = get_state_dict(model, optimizer)
    tensors = {"model": weights, "optimizer": averages, "random": random}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is")  # one process: so it is
            dcp.load(tensors, checkpoint_id=place, no_dist=not dist.is_initialized())
    except _ERRORS as error:
        raise _broken(place, error) from error
    set_state_dict(
        model, optimizer, model_state_dict=tensors["model"], optim_state_dict=tensors["optimizer"]
    )
    return tensors["random"]


def _broken(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path}: this checkpoint cannot be read ({_first_line(error)}); nothing was changed. Move "
        "it away to begin anew."
    )


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
