"""Train a small decoder with one variant of attention.

    python -m nsa_tutorial.training.capstone --attention nsa --task recall --out runs/nsa
    python -m nsa_tutorial.training.capstone --attention nsa --task recall --out runs/nsa --resume
    python -m nsa_tutorial.training.capstone --draw runs --picture curves.png

Kill it when you like: with --resume it goes on from its last checkpoint, to the same losses.
Several GPUs may share each text; torchrun starts a process for each:

    torchrun --nproc-per-node 2 -m nsa_tutorial.training.capstone \\
        --context-parallel 2 --out runs/two
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import MISSING, fields
from pathlib import Path

import torch
from tqdm.auto import tqdm

from nsa_tutorial.training.capstone import checkpoints, drawing, evaluate
from nsa_tutorial.training.capstone.settings import TASKS, VARIANTS, Settings
from nsa_tutorial.training.capstone.train import Run


def parser() -> argparse.ArgumentParser:
    """The command line: a flag for each field of `Settings`, and those of a run."""
    lines = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(
        prog="python -m nsa_tutorial.training.capstone", description=__doc__, formatter_class=lines,
        epilog="variants of attention:\n" + _list(VARIANTS) + "\ntasks:\n" + _list(TASKS),
    )  # fmt: skip
    kinds = {"int": int, "float": float, "str": str}
    for field in fields(Settings):
        flag = "--" + field.name.replace("_", "-")
        if field.type == "bool":
            action = argparse.BooleanOptionalAction
            p.add_argument(flag, action=action, default=None)
        else:
            choices = {"attention": VARIANTS, "task": TASKS}.get(field.name)
            default = "" if field.default is MISSING else f"(default for recall: {field.default})"
            p.add_argument(
                flag, type=kinds[field.type], choices=choices, help=default,
                metavar=None if choices else field.type.upper(),
            )  # fmt: skip
    p.add_argument("--out", type=Path, help="the folder of metrics and checkpoints")
    p.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS")
    p.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    p.add_argument(
        "--context-parallel",
        type=int,
        default=1,
        metavar="PROCESSES",
        help="that share a text, started by torchrun; any others take other texts",
    )
    p.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="that such a process is waited for",
    )
    p.add_argument("--tensorboard", action="store_true", help="also write events for TensorBoard")
    p.add_argument("--draw", type=Path, metavar="DIR", help="draw the runs in DIR, train nothing")
    p.add_argument("--picture", type=Path, default=Path("curves.png"), help="where --draw draws")
    return p


def _list(of: dict[str, str]) -> str:
    return "\n".join(f"  {name:15} {text}" for name, text in of.items())


def settings_of(arguments: argparse.Namespace) -> Settings:
    """What the flags ask for. On CUDA, the kernels are the default."""
    names = [field.name for field in fields(Settings)]
    given = {name: getattr(arguments, name) for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    is_shared = arguments.context_parallel > 1
    if is_shared or str(given.get("device", "cpu")).startswith("cuda"):
        given.setdefault("backend", "auto")
    return Settings.of(given.pop("task", "recall"), **given)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    p = parser()
    a = p.parse_args(arguments)
    if a.draw is not None:
        try:
            drawing.draw_runs(a.draw, a.picture)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        print(f"drawn to {a.picture}")
        return 0
    for flag, wanted in (("--resume", a.resume), ("--tensorboard", a.tensorboard)):
        if wanted and a.out is None:
            p.error(f"{flag} needs --out, the folder of the run")
    if a.checkpoint_every < 1:
        p.error(f"--checkpoint-every: got {a.checkpoint_every}, expected at least 1")
    try:
        settings = settings_of(a)
    except (ValueError, TypeError) as error:
        p.error(str(error))
    for name, least in (("context_parallel", 1), ("timeout", 1e-3)):
        if getattr(a, name) < least:
            flag = "--" + name.replace("_", "-")
            p.error(f"{flag}: got {getattr(a, name)}, expected at least {least}")
    try:
        if a.context_parallel == 1:
            return train(settings, a)
        return train_together(settings, a)
    except checkpoints.CheckpointError as error:
        print(error, file=sys.stderr)
        return 1


def train_together(settings: Settings, a: argparse.Namespace) -> int:
    """Train over the ranks that `torchrun` started."""
    from nsa_tutorial.training.capstone.ranks import Ranks
    from nsa_tutorial.training.many_gpus import RankLost

    try:
        ranks = Ranks(settings, a.context_parallel, a.timeout)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        return train(settings, a, ranks)
    except RankLost as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        torch.distributed.destroy_process_group()


def train(settings: Settings, a: argparse.Namespace, ranks: object = None) -> int:
    """Train, and say what came out of it; of several ranks the first one says it."""
    is_first = ranks is None or ranks.is_first
    writer = _writer_of_events() if a.tensorboard and is_first else None
    every = a.checkpoint_every
    run = Run(settings, a.out, checkpoint_every=every, resume=a.resume, ranks=ranks)
    events = writer(a.out / "events") if writer else None
    start, first = time.perf_counter(), run.step
    with tqdm(total=settings.steps, initial=run.step, unit="step", disable=not is_first) as bar:
        for metrics in run.steps():
            shown = {"loss": f"{metrics['loss']:.3f}", "tokens/s": metrics["tokens_per_second"]}
            bar.set_postfix(shown, refresh=False)
            bar.update()
            if events is not None:
                for name in ("loss", "accuracy", "tokens_per_second"):
                    events.add_scalar(name, metrics[name], metrics["step"])
    if events is not None:
        events.close()
    if not is_first:
        return 0
    run = run if ranks is None else run.alone()
    found = evaluate.summary(run)
    print(
        f"{settings.attention}, {settings.task}: after {run.step} steps the loss is "
        f"{found['loss']:.3f} and the accuracy {found['accuracy']:.1%} on texts held out"
    )
    if found.get("far") is not None:
        reach = evaluate.reach(run.settings)
        print(f"answers that lie {reach} tokens back or more: {found['far']:.1%}")
    if a.out is not None:
        facts = {
            "settings": settings.as_dict(), "found": found,
            "seconds": round(time.perf_counter() - start, 1), "steps": run.step - first,
            "machine": machine(settings), "versions": versions(),
        }  # fmt: skip
        (a.out / "result.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return 0


def machine(settings: Settings) -> str:
    """What the run ran on."""
    if settings.device.startswith("cuda"):
        return torch.cuda.get_device_name(settings.device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    """Of Python and PyTorch."""
    return {"python": platform.python_version(), "torch": torch.__version__}


def _writer_of_events() -> type:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise checkpoints.CheckpointError(
            "--tensorboard needs the package tensorboard: pip install tensorboard"
        ) from error
    return SummaryWriter


if __name__ == "__main__":
    sys.exit(main())
