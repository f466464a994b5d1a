"""Measure Native Sparse Attention on one GPU and over all: chapter 18 draws from the file.

    torchrun --nproc-per-node 2 -m nsa_tutorial.training.many_gpus.record \\
        --output assets/many_gpus.json

Each row has a `kind`, and rows are written as they come: forward and backward of one text on one
GPU and over all (`speed`), the bytes that ranks send (`bytes`), choices that differ (`lists`), a
timeline (`timeline`), and the longest texts whose gradients fit (`longest`). The first GPU measures
"one GPU" while the others wait.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from nsa_tutorial.bench.drawing import drifting
from nsa_tutorial.runtime import environment
from nsa_tutorial.training.many_gpus import branches, collectives, meshes, operators
from nsa_tutorial.training.many_gpus.__main__ import default_device, processes
from nsa_tutorial.training.many_gpus.cuts import KINDS, Cut
from nsa_tutorial.training.many_gpus.record_longest import longest
from nsa_tutorial.training.many_gpus.record_step import Shape, Step, on_each
from nsa_tutorial.training.many_gpus.record_timeline import timeline, trace
from nsa_tutorial.training.many_gpus.volume import bytes_moved

QUERIES = ("random", "smooth")


class Recorder(NamedTuple):
    """Where and what is measured."""

    mesh: meshes.Mesh
    context: meshes.Context
    device: str
    shape: Shape
    tokens: int
    repeats: int

    # -- time --

    def speed(self) -> Iterator[dict]:
        """Milliseconds of the forward, of the backward and of both: the slowest rank's."""
        for queries in QUERIES:
            one = None
            for kind in (None, *KINDS):
                step = self.step(queries, kind)
                times = on_each(self.context, partial(self.times, step) if step else None)
                del step
                self.empty()
                row = {
                    "kind": "speed", "queries": queries, "cut": kind, "tokens": self.tokens,
                    "gpus": len(times),
                    "forward_ms": median(slowest([of["forward"] for of in times])),
                    "backward_ms": median(slowest([of["backward"] for of in times])),
                    "ms": median(slowest([of["both"] for of in times])), "ranks": times,
                }  # fmt: skip
                one = row if kind is None else one
                row["efficiency"] = round(one["ms"] / row["ms"] / row["gpus"], 4)
                yield row

    def step(self, queries: str, kind: str | None) -> Step | None:
        """A forward and backward over all ranks; without a cut, on the first one alone."""
        if kind is None:
            return self.made(queries, None, None) if self.context.rank == 0 else None
        return self.made(queries, self.mesh, self.cut(kind))

    def made(self, queries: str, mesh: meshes.Mesh | None, cut: Cut | None) -> Step:
        """The tensors: those of the whole text, or this rank's share of them."""
        size = (self.shape.query_heads, self.shape.width)
        q = drifting(queries, self.tokens, size, self.shape.dtype, self.device)
        return Step.of(self.shape, q, mesh, cut)

    def times(self, step: Step) -> dict[str, object]:
        """Milliseconds of each repetition, and GiB at the most."""
        step.run()
        step.run()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        forward, backward = step.timed(self.repeats)
        both = [round(a + b, 4) for a, b in zip(forward, backward, strict=True)]
        most = torch.cuda.max_memory_allocated() if self.device == "cuda" else 0
        gib = round(most / 2**30, 2)
        return {"forward": forward, "backward": backward, "both": both, "gib": gib}

    def cut(self, kind: str) -> Cut:
        """Of the text over all ranks."""
        return Cut(self.context.ranks, self.tokens, kind)

    def empty(self) -> None:
        """Give back memory."""
        if self.device == "cuda":
            torch.cuda.empty_cache()

    # -- what travels --

    def bytes(self) -> Iterator[dict]:
        """Bytes that each rank sends, counted by hand and at the collectives."""
        for kind in KINDS:
            step = self.step("random", kind)
            with collectives.counted() as forward:
                o = step.forward()
            with collectives.counted() as backward:
                step.backward(o)
            forward.pop("settings", None)
            sizes = self.shape.sizes()
            sizes = {key: sizes[key] for key in ("length", "stride", "window_size")}
            by_hand = [
                bytes_moved(self.cut(kind), self.context.rank, self.shape.widths(), **sizes,
                            backward=back)
                for back in (False, True)
            ]  # fmt: skip
            mine = {"forward": dict(forward), "backward": dict(backward),
                    "by_hand": {"forward": by_hand[0], "backward": by_hand[1]}}  # fmt: skip
            del o, step
            self.empty()
            ranks = on_each(self.context, lambda mine=mine: mine)
            yield {"kind": "bytes", "cut": kind, "tokens": self.tokens, "ranks": ranks}

    # -- what is chosen --

    def lists(self) -> Iterator[dict]:
        """Lists that differ between one GPU and several."""
        made = {"length": self.shape.length, "stride": self.shape.stride}
        options = made | {"top_n": self.shape.top_n, "block_size": self.shape.block_size}
        for queries in QUERIES:
            with torch.no_grad():
                step = self.made(queries, None, None)
                expected = step.lists(options)
                for kind in KINDS:
                    cut = self.cut(kind)
                    q, k = (meshes.shard(x, self.mesh, cut) for x in (step.q, step.k))
                    k_cmp = operators.compress(k, mesh=self.mesh, cut=cut, **made)
                    found = branches.select_blocks(q, k_cmp, mesh=self.mesh, cut=cut, **options)
                    mine = meshes.shard(expected, self.mesh, cut)
                    differ = (found != mine).any(-1).sum().item()
                    counts = on_each(self.context, lambda differ=differ: differ)
                    yield {"kind": "lists", "queries": queries, "cut": kind, "tokens": self.tokens,
                           "lists": self.tokens * self.shape.kv_heads,
                           "different": sum(counts)}  # fmt: skip
            del step, expected
            self.empty()

    # -- what is hidden --

    def timelines(self) -> Iterator[dict]:
        """Kernels of one forward and backward on each rank."""
        for kind in KINDS:
            step = self.step("random", kind)
            step.run()
            on_each(self.context, None)  # begin together
            found = timeline(trace(step.run, self.device == "cuda"))
            del step
            self.empty()
            for rank, row in enumerate(on_each(self.context, lambda found=found: found)):
                yield {"kind": "timeline", "cut": kind, "tokens": self.tokens, "rank": rank} | row

    def rows(self) -> Iterator[dict]:
        """Everything, what matters most first."""
        parts = (self.speed, self.bytes, self.lists, self.timelines)
        for part in parts:
            start = time.perf_counter()
            for row in part():
                yield row | {"seconds": round(time.perf_counter() - start, 2)}
                start = time.perf_counter()
        yield from longest(self.context, self.mesh, self.shape, self.tokens)


def slowest(times: list[list[float]]) -> list[float]:
    """Of the ranks' times, each time the longest."""
    return [max(of) for of in zip(*times, strict=True)]


def median(times: list[float]) -> float:
    """The middle one."""
    return sorted(times)[len(times) // 2]


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    p = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node 2 -m nsa_tutorial.training.many_gpus.record",
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    p.add_argument("--output", type=Path, required=True)
    p.add_argument("--device", choices=("cuda", "cpu"), help="the default is what there is")
    p.add_argument("--tokens", type=int, default=131_072)
    p.add_argument("--repeats", type=int, default=7)
    a = p.parse_args(arguments)
    ranks, device = processes(), a.device or default_device()
    mesh = meshes.make_mesh(1, ranks, device, timeout=300.0)
    context = meshes.context_of(mesh)
    shape = Shape.of(device)
    env = environment.detect()
    command = " ".join(
        Path(x).name if "/" in x else x for x in (sys.argv[1:] if arguments is None else arguments)
    )
    facts = {
        "command": f"torchrun --nproc-per-node {ranks} -m {__spec__.name} {command}",
        "machine": f"{ranks} × {torch.cuda.get_device_name()}" if device == "cuda" else "CPU",
        "python": env.python, "torch": env.torch, "triton": env.triton,
        "shape": shape.as_dict(), "gpus": ranks,
    }  # fmt: skip
    found = []
    recorder = Recorder(mesh, context, device, shape, a.tokens, a.repeats)
    for row in recorder.rows():  # what is there is kept, should a later one fail
        found.append(row)
        if context.rank == 0:
            text = json.dumps(facts | {"rows": found}) + "\n"
            a.output.write_text(text, encoding="utf-8")
            print({key: x for key, x in row.items() if key not in ("events", "names")}, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a kernel that waits for a rank without memory would never end
