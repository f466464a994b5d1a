"""What each rank does in the tests of the capstone over several ranks."""

from __future__ import annotations

from pathlib import Path

from nsa_tutorial.training.capstone.checkpoints import CheckpointError, lines_until
from nsa_tutorial.training.capstone.ranks import Ranks
from nsa_tutorial.training.capstone.settings import Settings
from nsa_tutorial.training.capstone.train import Run

SIZES = {"length": 92, "batch": 4, "steps": 10, "width": 16, "head_width": 16, "layers": 2,
         "warmup": 2, "learning_rate": 1e-2, "backend": "reference"}  # fmt: skip


def settings(**changes: object) -> Settings:
    """Of a small run whose share of a text has no round length."""
    return Settings.of("recall", **(SIZES | changes))


def trained(
    rank: int, context: int, out: str | None, until: int, resume: bool = False, **changes: object
) -> list[float]:
    """Train over ranks; all losses that are in the file, or those of this process."""
    given = settings(**changes)
    run = Run(given, out, checkpoint_every=4, resume=resume, ranks=Ranks(given, context))
    losses = [metrics["loss"] for metrics in run.steps(until)]
    return losses if out is None else [line["loss"] for line in lines_until(Path(out), until)]


def refused(rank: int, out: str, fault: str) -> str:
    """What a rank says of a folder that it cannot use."""
    given = settings(seed=1 if fault == "other settings" else 0)
    try:
        run = Run(given, out, resume=fault != "a run already", ranks=Ranks(given, 2))
        list(run.steps())
    except CheckpointError as error:
        return str(error)
    return "nothing"


def too_few_texts(rank: int) -> str:
    """What a rank says of a step with fewer texts than groups."""
    try:
        Ranks(settings(batch=1), 1)
    except ValueError as error:
        return str(error)
    return "nothing"
