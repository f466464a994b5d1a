"""What chapters 17 and 19 draw from: many runs at once on one GPU and what they found, and how
fast a model of four layers is, by the length of its text. Each goes to a file.

    python -m nsa_tutorial.training.capstone.record recall --sizes short --output FILE.json
    python -m nsa_tutorial.training.capstone.record needle --output FILE.json
    python -m nsa_tutorial.training.capstone.record speed --output FILE.json
    python -m nsa_tutorial.training.capstone.record after --output FILE.json   # chapter 19
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa_tutorial.training.capstone import evaluate
from nsa_tutorial.training.capstone.__main__ import machine, versions
from nsa_tutorial.training.capstone.settings import Settings
from nsa_tutorial.training.capstone.train import Run

# the sizes of the recall task: short enough for a CPU, and long. In a "separate" one each branch
# has keys of its own; in the other long ones, summaries are made of the keys that the lists read
_LONG = {"length": 8192, "steps": 1000, "width": 128, "head_width": 128, "batch": 4,
         "learning_rate": 3e-3, "block_size": 64, "top_n": 8, "window_size": 64,
         "summary_length": 4, "stride": 4, "compression": "weighted",
         "backend": "auto"}  # fmt: skip
_FINE = _LONG | {"compression": "mean", "block_size": 32, "top_n": 16}
SIZES = {
    "short": {"length": 512, "steps": 1000, "width": 128, "head_width": 128, "batch": 16,
              "learning_rate": 2e-3},
    "long": _LONG | {"separate_keys": False},
    "long-separate": _LONG,
    "long-fine": _FINE | {"separate_keys": False},
    "long-fine-separate": _FINE,
}  # fmt: skip
# learned-choice scores in plain PyTorch, which takes over a second a step for long texts
VARIANTS = {
    "short": ("dense", "window", "nsa", "random", "no-selection", "no-summaries", "no-window",
              "learned-choice"),
    "long": ("dense", "nsa", "random", "no-selection", "window"),
    "long-separate": ("nsa",),
    "long-fine": ("nsa", "random", "no-selection", "no-summaries"),
    "long-fine-separate": ("nsa",),
}  # fmt: skip
NEEDLE = {"length": 2048, "steps": 1000, "width": 128, "head_width": 128, "batch": 16,
          "learning_rate": 1.5e-3, "block_size": 32, "top_n": 8, "window_size": 32,
          "backend": "auto"}  # fmt: skip
NEEDLES = {"shared": NEEDLE | {"separate_keys": False}, "separate": NEEDLE}
OF_NEEDLES = {"shared": ("dense", "window", "nsa", "random"), "separate": ("nsa",)}
# chapter 19: a size, how many blocks a list has, and what is trained. "tiny" is for a CPU
SIZES["tiny"] = {"length": 128, "steps": 300, "block_size": 8, "learning_rate": 5e-3, "warmup": 10}
_LISTED = ("moba", "msa", "dsa", "top", "any")
AFTER = {"short-5": ("short", 5, ("dense", "nsa", *_LISTED)), "short-2": ("short", 2, _LISTED),
         "tiny-3": ("tiny", 3, _LISTED)}  # fmt: skip
# of PyTorch, the first that can
DENSE = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
SNAPSHOTS = (1, 100, 200, 300, 400, 600, 800, 1000)


def recall(job: tuple[str, str, int, str, int]) -> dict:
    """One run of the recall task: its curve, and what it found."""
    size, variant, seed, device, steps = job
    changes = SIZES[size] | {"device": device} | ({"steps": steps} if steps else {})
    settings = Settings.of("recall", attention=variant, seed=seed, **changes)
    run, curve, lists, start = Run(settings), [], {}, time.perf_counter()
    films = size == "short" and seed == 0 and variant in ("nsa", "random")
    for metrics in run.steps():
        if metrics["step"] % 20 == 0 or metrics["step"] == 1:
            curve.append(
                [metrics["step"], round(metrics["loss"], 4), round(metrics["accuracy"], 4)]
            )
        if films and metrics["step"] in SNAPSHOTS:
            lists[metrics["step"]] = run.lists()[0, :, 0].tolist()
    row = {
        "size": size, "attention": variant, "seed": seed, "settings": settings.as_dict(),
        "seconds": round(time.perf_counter() - start, 1), "curve": curve,
        "found": evaluate.summary(run, 8 if size == "short" else 4),
    }  # fmt: skip
    if films:
        texts = run.task.texts(evaluate.HELD_OUT)
        row["lists"] = lists
        row["text"] = {"target": texts.target[0].tolist(), "distance": texts.distance[0].tolist()}
    if variant == "nsa":
        row["without"] = without(run)
    return row


def after(job: tuple[str, str, int, str, int]) -> dict:
    """One run of the recall task: its curve, and far answers and hits as it learns."""
    name, variant, seed, device, steps = job
    size, blocks, _ = AFTER[name]
    changes = SIZES[size] | {"top_n": blocks, "device": device}
    changes |= {"steps": steps} if steps else {}
    run = Run(Settings.of("recall", attention=variant, seed=seed, **changes))
    curve, progress, start = [], [], time.perf_counter()
    for metrics in run.steps():
        if metrics["step"] % 20 == 0 or metrics["step"] == 1:
            curve.append([metrics["step"], round(metrics["loss"], 4)])
        if metrics["step"] % 100 == 0 or metrics["step"] == 1:
            found = evaluate.summary(run, 1)
            progress.append([metrics["step"], found["far"], found.get("hits")])
    return {
        "blocks": blocks, "attention": variant, "seed": seed,
        "settings": run.settings.as_dict(), "seconds": round(time.perf_counter() - start, 1),
        "curve": curve, "progress": progress, "found": evaluate.summary(run, 8),
    }  # fmt: skip


def without(run: Run) -> dict[str, dict]:
    """What is left when a branch of a trained NSA is taken away."""
    layers, found = [block.attend for block in run.model.blocks], {}
    for variant in ("no-summaries", "no-selection", "no-window", "random"):
        for layer in layers:
            layer.variant = variant
        found[variant] = evaluate.summary(run, 2)
    for layer in layers:
        layer.variant = "nsa"
    return found


def needle(job: tuple[str, str, int, str, int]) -> dict:
    """One run of the needle task, and its map."""
    keys, variant, seed, device, steps = job
    changes = NEEDLES[keys] | {"device": device} | ({"steps": steps} if steps else {})
    run = Run(Settings.of("needle", attention=variant, seed=seed, **changes))
    start = time.perf_counter()
    curve = [
        [m["step"], round(m["loss"], 4), round(m["accuracy"], 4)]
        for m in run.steps()
        if m["step"] % 20 == 0 or m["step"] == 1
    ]
    lengths = [length for length in (256, 512, 1024, 2048) if length <= run.settings.length]
    return {
        "attention": variant, "seed": seed, "keys": keys, "settings": run.settings.as_dict(),
        "curve": curve, "seconds": round(time.perf_counter() - start, 1),
        "lengths": lengths, "map": evaluate.needle_map(run, lengths, batches=4),
    }  # fmt: skip


def speed(device: str) -> Iterator[dict]:
    """Forward and backward of a model of four layers, dense and NSA, by the length of the text."""
    for tokens in (2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072):
        for variant in ("dense", "nsa"):
            settings = Settings.of(
                "bytes", attention=variant, length=tokens, batch=1, layers=4, width=1024,
                query_heads=16, kv_heads=1, head_width=128, block_size=64, top_n=16,
                window_size=512, summary_length=32, stride=16, compression="mean",
                device=device, backend="auto",
            )  # fmt: skip
            run = Run(settings)
            x = torch.randint(256, (1, tokens), device=device)
            with sdpa_kernel(DENSE, set_priority=True):
                times = sorted(_milliseconds(run, x) for _ in range(5))
            yield {
                "attention": variant,
                "tokens": tokens,
                "ms": round(times[2], 3),
                "all_ms": [round(t, 3) for t in times],
            }
            del run
            torch.cuda.empty_cache()


def _milliseconds(run: Run, x: Tensor) -> float:
    """One forward and backward pass, after one that is not timed."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        run.model.zero_grad()
        start.record()
        with torch.autocast("cuda", torch.bfloat16):
            logits = run.model(x)
        torch.nn.functional.cross_entropy(logits.float()[0], x[0]).backward()
        end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    p = argparse.ArgumentParser(prog="python -m nsa_tutorial.training.capstone.record")
    p.add_argument("what", choices=("recall", "needle", "speed", "after"))
    p.add_argument("--output", type=Path, required=True)
    p.add_argument("--device", default="cuda")
    p.add_argument("--processes", type=int, default=14)
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--steps", type=int, default=0, help="0: those of the task")
    p.add_argument("--sizes", nargs="+", choices=[*VARIANTS, *AFTER], help="all by default")
    p.add_argument("--variants", nargs="+", help="of attention; all of the size by default")
    a = p.parse_args(arguments)
    facts = {
        "command": " ".join(["python -m nsa_tutorial.training.capstone.record", *sys.argv[1:]]),
        "machine": machine(Settings(device=a.device)), "versions": versions(),
    }  # fmt: skip
    found = []
    if a.what == "speed":
        rows = speed(a.device)
    else:
        one = {"recall": recall, "needle": needle, "after": after}[a.what]
        of_size = {"recall": VARIANTS, "needle": OF_NEEDLES}.get(a.what)
        of_size = of_size or {name: variants for name, (_, _, variants) in AFTER.items()}
        by_default = ("short-5", "short-2") if a.what == "after" else of_size
        jobs = [
            (size, variant, seed, a.device, a.steps)
            for seed in range(a.seeds)
            for size in a.sizes or by_default
            for variant in (a.variants or of_size[size])
        ]
        rows = _all(one, jobs, a.processes)
    for row in rows:  # what is there is kept, should a later one fail
        found.append(row)
        a.output.write_text(json.dumps(facts | {"rows": found}) + "\n", encoding="utf-8")
    return 0


def _all(function: Callable[[tuple], dict], jobs: list[tuple], processes: int) -> Iterator[dict]:
    """The rows of all jobs, as they are done."""
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(function, job) for job in jobs]):
            yield done.result()


if __name__ == "__main__":
    sys.exit(main())
